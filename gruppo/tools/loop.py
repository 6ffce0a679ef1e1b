"""Multi-turn rollouts: the model calls tools, reads their answers and continues.

    prompt │ turn ─ answers ─ turn ─ answers ─ turn
           │ 1 1 1  0 0 0 0   1 1 1  0 0 0 0   1 1 1     model_mask

The model's output is never re-tokenised: each turn's ids are kept as sampled, and only the tokens of the answers are
appended.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from gruppo.tools.calls import answer, read_call
from gruppo.tools.executor import ToolExecutor
from gruppo.tools.functions import Tool
from gruppo.types import Completion, Message, StopReason


@dataclass
class Episode:
    """One sample in progress: the turns of the model, and the answers between them."""

    prompt_ids: Sequence[int]
    tools: Mapping[str, Tool]
    turns: list[Completion]
    answers: list[list[int]] = field(default_factory=list)  # token ids; one list fewer than turns
    messages: list[Message] = field(default_factory=list)
    out_of_room: bool = False  # the last answers did not fit
    calls: int = 0
    failures: int = 0

    @property
    def ids(self) -> list[int]:
        """Prompt and completion so far."""
        return [*self.prompt_ids, *chain.from_iterable(_interleaved(self.turns, self.answers))]

    @property
    def written(self) -> int:
        """Tokens of the completion so far, answers included."""
        return sum(map(len, self.answers)) + sum(len(turn.ids) for turn in self.turns)

    @property
    def requested(self) -> list[Any]:
        """The calls that still need an answer. A truncated turn has none, since nothing can follow it."""
        if self.out_of_room or not self.turns[-1].stop.ended or not self.messages:
            return []
        return list(self.messages[-1].get("tool_calls") or [])

    @property
    def completion(self) -> Completion:
        """All turns and answers as one completion."""
        joined = join(self.turns, self.answers)
        return replace(joined, stop=StopReason.TOOL_BUDGET) if self.out_of_room else joined


@dataclass(frozen=True)
class Turn:
    """A request to the sampler: the next turn of some rows, each with the most tokens it may write."""

    number: int
    rows: Sequence[int]
    prompt_ids: list[list[int]]
    limits: Sequence[int]


LONGEST_TOKEN = 50  # most characters of one token

Parse = Callable[[Episode], Message]
Suffix = Callable[[list[str], list[Message], bool], list[int]]


class ToolLoop:
    """Runs the rounds of a batch of episodes.

    `suffix` returns the tokens between a turn with calls and the next one, `parse` the message of the last turn.
    `total` sums a count over processes, so that all make as many rounds as the process that needs the most.
    """

    def __init__(
        self,
        parse: Parse,
        suffix: Suffix,
        executor: ToolExecutor,
        *,
        budget: int,
        context_length: int | None = None,
        max_rounds: int | None = None,
        total: Callable[[int], int] = int,
        longest_token: int = LONGEST_TOKEN,
    ):
        self.parse, self.suffix, self.executor, self.total = parse, suffix, executor, total
        self.budget = budget
        self.context_length = context_length
        self.max_rounds = max_rounds
        self.longest_token = longest_token
        self.seconds = 0.0  # time spent in tools during the last run

    def run(self, episodes: Sequence[Episode], sample: Callable[[Turn], Sequence[Completion]]) -> None:
        """Continue every episode until it has no unanswered call, no room for tokens, or no round left."""
        self.seconds = 0.0
        for episode in episodes:
            self._read(episode)
        rounds = 0
        while self.max_rounds is None or rounds < self.max_rounds:
            waiting = [row for row, episode in enumerate(episodes) if episode.requested]
            if not self.total(len(waiting)):
                break
            rounds += 1
            self._answer([episodes[row] for row in waiting])
            going_on = [row for row in waiting if not episodes[row].out_of_room]
            if not going_on:
                continue  # other processes may have rows
            turn = Turn(
                rounds,
                going_on,
                [episodes[row].ids for row in going_on],
                [self._room(episodes[row]) for row in going_on],
            )
            for row, completion, limit in zip(going_on, sample(turn), turn.limits, strict=True):
                episodes[row].turns.append(cut(completion, limit))
                self._read(episodes[row])

    def _read(self, episode: Episode) -> None:
        if episode.turns[-1].ids or not episode.messages:
            episode.messages.append(self.parse(episode))

    def _room(self, episode: Episode, more: int = 0) -> int:
        """The number of tokens that may still follow after `more` further ones."""
        room = self.budget - episode.written
        if self.context_length is not None:
            room = min(room, self.context_length - len(episode.prompt_ids) - episode.written)
        return room - more

    def _answer(self, episodes: Sequence[Episode]) -> None:
        """Run the calls of the last turns and append their answers; an episode without room for them ends."""
        calls = [[read_call(raw, episode.tools) for raw in episode.requested] for episode in episodes]
        start = time.perf_counter()
        outcomes = self.executor.run(calls)
        self.seconds += time.perf_counter() - start
        for episode, made, came in zip(episodes, calls, outcomes, strict=True):
            episode.calls += len(made)
            episode.failures += sum(outcome.error is not None for outcome in came)
            messages = [answer(call, outcome) for call, outcome in zip(made, came, strict=True)]
            ids = self._tokens(episode, messages)
            if ids is None or self._room(episode, more=len(ids)) < 1:
                episode.out_of_room = True
            else:
                episode.answers.append(ids)
                episode.messages += messages

    def _tokens(self, episode: Episode, messages: list[Message]) -> list[int] | None:
        """The tokens of answers; None if they are so long that they cannot fit, however they are tokenised."""
        if sum(len(message["content"]) for message in messages) > self._room(episode) * self.longest_token:
            return None
        ended = episode.turns[-1].stop is StopReason.EOS  # else a stop string ended it; the end token must be added
        return self.suffix([message["name"] for message in messages], messages, ended)


def _interleaved(turns: Sequence[Completion], answers: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    pieces: list[Sequence[int]] = [turns[0].ids]
    for i, ids in enumerate(answers):
        pieces.append(ids)
        if i + 1 < len(turns):
            pieces.append(turns[i + 1].ids)
    return pieces


def join(turns: Sequence[Completion], answers: Sequence[Sequence[int]]) -> Completion:
    """Turns and the answers between them as one completion; answers have log-prob and entropy 0.

    Example:
        join([Completion([5, 9], EOS), Completion([7], EOS)], [[40, 41]])
        -> Completion([5, 9, 40, 41, 7], EOS, model_mask=[1, 1, 0, 0, 1])
    """
    blanks = [[0] * len(ids) for ids in answers] + [[]]

    def joined(parts: Sequence[Sequence[Any]], between: Sequence[Sequence[Any]] = blanks) -> list[Any]:
        return [value for part, blank in zip(parts, between, strict=True) for value in (*part, *blank)]

    def known(name: str) -> list[Any] | None:
        parts = [getattr(turn, name) for turn in turns]
        return None if any(part is None for part in parts) else joined(parts, zeros)

    zeros = [[0.0] * len(blank) for blank in blanks]
    some_logps = any(turn.logps is not None for turn in turns)
    return Completion(
        ids=joined([turn.ids for turn in turns], [*answers, []]),
        stop=turns[-1].stop,
        # Log-probs from a rollout function are kept, even if those of later turns are unknown.
        logps=joined([t.logps or [None] * len(t.ids) for t in turns], zeros) if some_logps else None,
        model_mask=joined([t.model_mask or [1] * len(t.ids) for t in turns]),
        plain_logps=known("plain_logps"),
        entropies=known("entropies"),
    )


def cut(completion: Completion, limit: int) -> Completion:
    """Truncate a completion to the limit, for samplers that do not respect it themselves."""
    if len(completion.ids) <= limit:
        return completion

    names = ("ids", "logps", "model_mask", "plain_logps", "entropies")
    heads = {name: value[:limit] for name in names if (value := getattr(completion, name)) is not None}
    return replace(completion, stop=StopReason.LENGTH, **heads)
