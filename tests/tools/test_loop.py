from collections.abc import Sequence
from typing import Any

import pytest

from gruppo.tools.executor import ToolExecutor
from gruppo.tools.functions import make_tool
from gruppo.tools.loop import Episode, ToolLoop, Turn, cut, join
from gruppo.types import Completion, Message, StopReason
from tests.tools.test_functions import add

EOS, LENGTH = StopReason.EOS, StopReason.LENGTH

# In these tests a turn that begins with 7 calls add(1, 2), one that begins with 8 calls a tool that is not there, and
# an answer of n messages has 2 + n tokens.
PROMPT = [1, 2, 3]


def parse(episode: Episode) -> Message:
    calls = {7: "add", 8: "mul"}
    first = episode.turns[-1].ids[0] if episode.turns[-1].ids else 0
    if first not in calls:
        return {"role": "assistant", "content": "text"}
    arguments = {"a": 1, "b": 2}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": calls[first], "arguments": arguments}}],
    }


def suffix(names: list[str], messages: list[Message], ended: bool) -> list[int]:
    return [60, *([61] * len(names)), 62 if ended else 63]


def turn(*ids: int, stop: StopReason = EOS) -> Completion:
    return Completion(list(ids), stop, plain_logps=[-float(i) for i in ids], entropies=[i / 2 for i in ids])


class Sampler:
    """Answers each row with its next stored turn."""

    def __init__(self, *later: list[Completion]):
        self.later = [list(turns) for turns in later]
        self.asked: list[Turn] = []

    def __call__(self, asked: Turn) -> Sequence[Completion]:
        self.asked.append(asked)
        return [self.later[row].pop(0) for row in asked.rows]


def run(*rows: list[Completion], **settings: Any) -> tuple[list[Episode], Sampler]:
    episodes = [Episode(PROMPT, {"add": make_tool(add)}, [turns[0]]) for turns in rows]
    sampler = Sampler(*(turns[1:] for turns in rows))
    loop = ToolLoop(parse, suffix, ToolExecutor(), **{"budget": 100, **settings})
    loop.run(episodes, sampler)
    return episodes, sampler


def test_turns_and_answers_are_joined() -> None:
    (called, plain), sampler = run([turn(7, 10), turn(7, 11, 12), turn(20)], [turn(30, 31)])
    completion = called.completion
    assert completion.ids == [7, 10, 60, 61, 62, 7, 11, 12, 60, 61, 62, 20]
    assert completion.model_mask == [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert completion.plain_logps == [-7, -10, 0, 0, 0, -7, -11, -12, 0, 0, 0, -20]
    assert completion.entropies == [3.5, 5, 0, 0, 0, 3.5, 5.5, 6, 0, 0, 0, 10]
    assert completion.logps is None
    assert completion.stop is EOS
    assert [message["role"] for message in called.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert (called.calls, called.failures) == (2, 0)
    assert plain.completion == Completion([30, 31], EOS, None, [1, 1], [-30, -31], [15, 15.5])

    first, second = sampler.asked
    assert (first.number, first.rows, first.prompt_ids) == (1, [0], [[1, 2, 3, 7, 10, 60, 61, 62]])
    assert (second.number, second.rows) == (2, [0])
    assert second.prompt_ids == [[1, 2, 3, 7, 10, 60, 61, 62, 7, 11, 12, 60, 61, 62]]


def test_each_round_asks_for_what_is_left_of_the_budget() -> None:
    _, sampler = run([turn(7, 10), turn(7), turn(20)], budget=30)
    assert [asked.limits for asked in sampler.asked] == [[30 - 5], [30 - 5 - 4]]
    _, sampler = run([turn(7, 10), turn(20)], budget=30, context_length=20)
    assert sampler.asked[0].limits == [20 - 3 - 5]


@pytest.mark.parametrize("limit", [{"budget": 5}, {"context_length": 8}])
def test_answers_that_leave_no_room_are_taken_back(limit: dict[str, int]) -> None:
    (episode, other), sampler = run([turn(7, 10), turn(20)], [turn(7), turn(20, 21)], **limit)
    completion = episode.completion
    assert (completion.ids, completion.model_mask) == ([7, 10], [1, 1])
    assert completion.stop is StopReason.TOOL_BUDGET
    assert not completion.stop.ended
    assert [message["role"] for message in episode.messages] == ["assistant"]
    assert episode.calls == 1, "a call that was made counts"
    # The other one has room for one more token.
    assert sampler.asked[0].rows == [1]
    assert sampler.asked[0].limits == [1]
    assert (other.completion.ids, other.completion.stop) == ([7, 60, 61, 62, 20], LENGTH)


def test_an_answer_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    def shout(text: str) -> str:
        """Shout.

        Args:
            text: what
        """
        return "x" * 1001

    monkeypatch.setattr(f"{__name__}.add", shout)
    monkeypatch.setattr(f"{__name__}.parse", lambda episode: parsed)
    function = {"name": "add", "arguments": {"text": ""}}
    parsed = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    seen: list[Any] = []
    monkeypatch.setattr(f"{__name__}.suffix", lambda *given: seen.append(given) or [60])
    (episode,), _ = run([turn(7, 10), turn(20)], budget=12, longest_token=100, max_rounds=1)
    assert seen == []
    assert episode.completion.stop is StopReason.TOOL_BUDGET
    (episode,), _ = run([turn(7, 10), turn(20)], budget=12, longest_token=101, max_rounds=1)
    assert len(seen) == 1
    assert episode.completion.stop is EOS


def test_what_a_sampler_writes_beyond_the_limit_is_cut() -> None:
    (episode,), _ = run([turn(7), turn(20, 21, 22)], budget=6)
    completion = episode.completion
    assert (completion.ids, completion.stop) == ([7, 60, 61, 62, 20, 21], LENGTH)
    assert completion.plain_logps is not None
    assert len(completion.plain_logps) == 6


@pytest.mark.parametrize(("limit", "rounds"), [(0, 0), (1, 1), (2, 2), (None, 3)])
def test_rounds_are_limited(limit: int | None, rounds: int) -> None:
    (episode,), sampler = run([turn(7), turn(7), turn(7), turn(20)], max_rounds=limit)
    assert len(sampler.asked) == rounds == episode.calls
    last = episode.messages[-1]
    assert ("tool_calls" in last) == (limit is not None), "a call that is not answered stays the last word"
    assert episode.completion.stop is EOS


def test_a_turn_that_was_cut_calls_nothing() -> None:
    (episode,), sampler = run([turn(7, 10, stop=LENGTH)])
    assert sampler.asked == []
    assert episode.calls == 0
    assert episode.completion.stop is LENGTH


def test_an_empty_turn_adds_no_message() -> None:
    (later, at_once), _ = run([turn(7), turn(stop=StopReason.NO_ROOM)], [turn(stop=StopReason.NO_ROOM)])
    assert [message["role"] for message in later.messages] == ["assistant", "tool"]
    assert later.completion.model_mask == [1, 0, 0, 0]
    assert later.completion.stop is StopReason.NO_ROOM
    assert [message["role"] for message in at_once.messages] == ["assistant"]


def test_a_turn_that_a_stop_string_ended_is_closed_first() -> None:
    (episode,), _ = run([turn(7, stop=StopReason.STOP_STRING), turn(20)])
    assert list(episode.completion.ids) == [7, 60, 61, 63, 20]


def test_failures_are_counted_and_told() -> None:
    (episode,), _ = run([turn(8), turn(20)])
    assert (episode.calls, episode.failures) == (1, 1)
    assert episode.messages[1] == {"role": "tool", "name": "mul", "content": "{'error': 'Tool mul not found.'}"}


def test_processes_make_the_same_number_of_rounds() -> None:
    others = iter([2, 1, 1, 0])
    seen: list[int] = []

    def total(count: int) -> int:
        seen.append(count)
        return count + next(others)

    _, sampler = run([turn(7), turn(20)], [turn(20)], total=total)
    assert seen == [1, 0, 0, 0]
    assert len(sampler.asked) == 1, "who has nothing to ask for asks for nothing"


def test_log_probs_of_a_rollout_function_are_kept() -> None:
    first, second = Completion([7, 8], EOS, logps=[-1.0, -2.0]), Completion([9], EOS)
    assert join([first, second], [[60, 61]]).logps == [-1.0, -2.0, 0.0, 0.0, None]
    masked = Completion([7, 8, 9], EOS, model_mask=[1, 0, 1])
    assert join([masked, second], [[60]]).model_mask == [1, 0, 1, 0, 1]
    assert join([turn(7), second], [[60]]).plain_logps is None, "known of all tokens or of none"


def test_cut_keeps_what_fits() -> None:
    completion = Completion([1, 2], EOS, [-1.0, -2.0], [1, 1])
    assert cut(completion, 2) is completion
    assert cut(completion, 1) == Completion([1], LENGTH, [-1.0], [1])
