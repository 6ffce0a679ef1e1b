"""Rounds of tool-integrated reasoning: a scripted model for every rule, and the built-in engine for the ids."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from gruppo.demo import load_task, model_path
from gruppo.errors import ConfigError
from gruppo.evaluation import tir
from gruppo.evaluation.grading import grade_attempts
from gruppo.evaluation.programs import python_blocks
from gruppo.evaluation.tir import OUTPUT_STOP, Segment, TirSettings, Transcript, run_rounds
from gruppo.evaluation.types import Attempt, GradedAttempt, Problem
from gruppo.grading import LADDERS, Rule
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.builtin import BuiltinBackend
from gruppo.sandbox import Execution, Limits, Sandbox
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import in_double

# Tokens of several characters, some of which reach over the end of a stop string. The longest match wins.
PIECES = ["output", "output\n", "put", "put\n4", "\n```", "python\n", "print", "``", "```"]


def make_tokenizer() -> Any:
    """Printable ASCII, line breaks, and PIECES."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *characters, *PIECES])}
    longest = models.WordPiece(
        vocabulary, unk_token="<unk>", continuing_subword_prefix="", max_input_chars_per_word=9**9
    )
    backend = Tokenizer(longest)
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids_of(*pieces: str) -> list[int]:
    """The ids of texts that are tokenised one by one."""
    return [token for piece in pieces for token in TOKENIZER(piece, add_special_tokens=False)["input_ids"]]


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


Script = Callable[[str, int], str | list[str]]


class ScriptedBackend(RolloutBackend):
    """Writes `script(what follows the prompt, sample)`, up to a limit, an end or a stop string in its own words."""

    def __init__(self, script: Script, stops: Sequence[str] = ("```output",), max_new_tokens: int = 10_000):
        self.script = script
        self.config = SimpleNamespace(stop_strings=list(stops), max_new_tokens=max_new_tokens)
        self.asked: list[list[SampleRequest]] = []
        self.blocks = 0

    @contextmanager
    def turns(self) -> Iterator[None]:
        self.blocks += 1
        yield

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        assert self.blocks == 1, "all rounds are one block of turns"
        self.asked.append(list(requests))
        return [self._write(request, request.first_sample + i) for request in requests for i in range(request.count)]

    def _write(self, request: SampleRequest, sample: int) -> Completion:
        pieces = self.script(text_of(request.prompt_ids).partition("?")[2], sample)
        wanted = ids_of(*([pieces] if isinstance(pieces, str) else pieces))
        written: list[int] = []
        for token in wanted:
            if len(written) == request.limit(self.config.max_new_tokens):
                return Completion(written, StopReason.LENGTH)
            written.append(token)
            if token == EOS:
                return Completion(written, StopReason.EOS)
            if any(stop in text_of(written) for stop in self.config.stop_strings):
                return Completion(written, StopReason.STOP_STRING)
        return Completion(written, StopReason.LENGTH)


def table(answers: dict[str, str | list[str]]) -> Script:
    """A script for one sample: what follows a text that ends in the key."""

    def script(said: str, sample: int) -> str | list[str]:
        ends = [key for key in answers if said.endswith(key)]
        return answers[max(ends, key=len)]

    return script


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return TirSettings(allow_unconfined=Sandbox.capabilities().missing).open_sandbox()


def rounds(
    backend: ScriptedBackend, sandbox: Any, *, samples: int = 1, max_new_tokens: int = 1000, **settings: Any
) -> list[Transcript]:
    return run_rounds(
        backend,
        TOKENIZER,
        [ids_of("Q?")],
        samples=samples,
        noise_keys=[5],
        max_new_tokens=max_new_tokens,
        settings=TirSettings(**settings),
        sandbox=sandbox,
    )


def play(answers: dict[str, str | list[str]], sandbox: Any, **settings: Any) -> tuple[Transcript, ScriptedBackend]:
    backend = ScriptedBackend(table(answers))
    (transcript,) = rounds(backend, sandbox, **settings)
    for before, after in zip(backend.asked, backend.asked[1:], strict=False):
        assert after[0].turn == before[0].turn + 1
    assert transcript.text == "".join(segment.text for segment in transcript.segments)
    return transcript, backend


PROGRAM = "```python\nprint(6 * 7)\n```\n"


# ---- how a round ends


def test_an_end_of_sequence_finishes(sandbox: Sandbox) -> None:
    transcript, backend = play({"": "So \\boxed{1}.<eos>more"}, sandbox)
    assert transcript.text == "So \\boxed{1}."
    assert (transcript.stop, transcript.tokens) == (StopReason.EOS, len("So \\boxed{1}.") + 1)
    assert transcript.tools.to_dict() == {"rounds": 1, "executions": 0, "errors": 0, "timeouts": 0, "output": None}
    assert len(backend.asked) == 1


def test_an_end_of_sequence_behind_a_program_finishes_too(sandbox: Sandbox) -> None:
    transcript, _ = play({"": PROGRAM + "<eos>"}, sandbox)
    assert (transcript.text, transcript.tools.executions) == (PROGRAM, 0)


def test_a_program_is_run_and_the_model_goes_on(sandbox: Sandbox) -> None:
    transcript, backend = play({"": PROGRAM + "```output\n41\n```\n", "42\n```\n": "So 42.<eos>"}, sandbox)
    assert transcript.segments == (
        Segment("model", PROGRAM),
        Segment("output", "```output\n42\n```\n"),
        Segment("model", "So 42."),
    )
    assert transcript.stop is StopReason.EOS
    assert transcript.tools.to_dict() == {"rounds": 2, "executions": 1, "errors": 0, "timeouts": 0, "output": "42\n"}
    model_ids = ids_of(PROGRAM + "```output")
    assert transcript.tokens == len(model_ids) + len(ids_of("So 42.<eos>")), "outputs are not the model's"
    second = backend.asked[1][0]
    assert (second.noise_key, second.first_sample, second.count, second.turn) == (5, 0, 1, 1)


@pytest.mark.parametrize(
    "fence",
    [
        ["```output"],
        ["```", "output\n", "42\n```\n"],
        ["```", "out", "put\n4", "2\n```\n"],
        ["`", "``", "output\n41\n```\n"],
        ["\n```", "output"],
    ],
)
def test_output_that_the_model_invents_is_never_scored(sandbox: Sandbox, fence: list[str]) -> None:
    code = "```python\nprint(1 + 1)\n```"
    first = [code, *fence] if fence[0].startswith("\n") else [code + "\n", *fence]
    transcript, backend = play({"": first, "\n2\n```\n": "<eos>"}, sandbox)
    assert transcript.text == code + "\n```output\n2\n```\n"
    assert text_of(backend.asked[1][0].prompt_ids) == "Q?" + transcript.text


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ("Let us see.\n```output", "Let us see.\n```output\n{}\n```\n"),
        ("```output", "```output\n{}\n```\n"),
        ("```python\nprint(1)\n```output", "```python\nprint(1)\n```output\n{}\n```\n"),
        (PROGRAM + "Output:\n```output", PROGRAM + "Output:\n```output\n{}\n```\n"),
        ("See ```output", "See \n```output\n{}\n```\n"),
    ],
)
def test_no_program_is_told_and_is_no_execution(sandbox: Sandbox, first: str, text: str) -> None:
    transcript, backend = play({"": first, "run\n```\n": "<eos>"}, sandbox)
    assert transcript.text == text.format("Runtime errors: there is no program to run")
    assert transcript.tools.to_dict() == {"rounds": 2, "executions": 0, "errors": 0, "timeouts": 0, "output": None}
    assert text_of(backend.asked[1][0].prompt_ids) == "Q?" + transcript.text


def test_the_last_program_is_the_last_that_ran(sandbox: Sandbox) -> None:
    transcript, _ = play({"": PROGRAM + "```output", "42\n```\n": "See:\n```output", "run\n```\n": "<eos>"}, sandbox)
    assert transcript.tools.to_dict() == {"rounds": 3, "executions": 1, "errors": 0, "timeouts": 0, "output": "42\n"}


def test_a_round_that_is_cut_short_goes_on(sandbox: Sandbox) -> None:
    """The fence itself is cut in two, so the backend sees no stop string and writes on."""
    whole = ids_of(PROGRAM + "``") + ids_of("`out", "put", "\n41\n```\n<eos>")
    cut = len(ids_of(PROGRAM + "``")) + 4

    def script(said: str, sample: int) -> list[str]:
        if said.endswith("42\n```\n"):
            return ["ok<eos>"]
        done = len(ids_of(PROGRAM + "``")) + 4 if said else 0
        return [TOKENIZER.decode([token]) for token in whole[done:]]

    backend = ScriptedBackend(script)
    (transcript,) = rounds(backend, sandbox, max_new_tokens=cut)
    assert transcript.text == PROGRAM + "```output\n42\n```\nok"
    assert transcript.stop is StopReason.EOS
    assert (transcript.tools.rounds, transcript.tools.executions) == (3, 1)
    assert transcript.tokens == len(whole) + 3, "what was written and thrown away was written"
    first, second, third = (asked[0].prompt_ids for asked in backend.asked)
    assert second == [*first, *whole[:cut]]
    assert text_of(third) == "Q?" + PROGRAM + "```output\n42\n```\n"
    assert EOS not in third, "the end behind the invented output is gone"


def test_an_end_right_behind_a_fence_that_was_cut_in_two(sandbox: Sandbox) -> None:
    pieces = [PROGRAM, "```", "out"]
    script = table({"": pieces, "```out": ["put", "<eos>"], "42\n```\n": "ok<eos>"})
    backend = ScriptedBackend(script)
    (transcript,) = rounds(backend, sandbox, max_new_tokens=len(ids_of(*pieces)))
    assert transcript.text == PROGRAM + "```output\n42\n```\nok"
    assert EOS not in backend.asked[2][0].prompt_ids


def test_a_round_without_a_stop_goes_on_with_the_same_words(sandbox: Sandbox) -> None:
    answers: dict[str, str | list[str]] = {"": "abcdef", "abc": "def<eos>", "abcdef": "<eos>"}
    transcript, backend = play(answers, sandbox, max_new_tokens=3)
    assert (transcript.text, transcript.stop, transcript.tools.rounds) == ("abcdef", StopReason.EOS, 3)
    assert [text_of(asked[0].prompt_ids) for asked in backend.asked] == ["Q?", "Q?abc", "Q?abcdef"]
    transcript, _ = play(answers, sandbox, max_new_tokens=3, rounds=2)
    assert (transcript.text, transcript.stop, transcript.tools.rounds) == ("abcdef", StopReason.LENGTH, 2)


@pytest.mark.parametrize("reason", [StopReason.NAN, StopReason.NO_ROOM, StopReason.UNKNOWN])
def test_other_ends_are_handed_on(sandbox: Sandbox, reason: StopReason) -> None:
    backend = ScriptedBackend(table({"": ""}))
    backend._write = lambda request, sample: Completion(ids_of("ab"), reason)  # type: ignore[method-assign]
    (transcript,) = rounds(backend, sandbox)
    assert (transcript.text, transcript.stop, transcript.tools.rounds) == ("ab", reason, 1)


def test_another_stop_string_finishes_and_is_cut(sandbox: Sandbox) -> None:
    script = table({"": PROGRAM + "```output", "42\n```\n": "So 42.\nQ: and ```output"})
    backend = ScriptedBackend(script, stops=["\nQ:", "```output"])
    (transcript,) = rounds(backend, sandbox)
    assert transcript.text == PROGRAM + "```output\n42\n```\nSo 42."
    assert (transcript.stop, transcript.tools.executions) == (StopReason.STOP_STRING, 1)


# ---- limits


def test_the_output_of_the_last_round_is_appended_and_the_model_is_silent(sandbox: Sandbox) -> None:
    second = "```python\nprint(7)\n```\n"
    answers = {"": PROGRAM + "```output", "42\n```\n": second + "```output\n9\n```\n\\boxed{9}<eos>"}
    transcript, backend = play(answers, sandbox, rounds=2)
    assert transcript.text == PROGRAM + "```output\n42\n```\n" + second + "```output\n7\n```\n"
    assert (transcript.stop, len(backend.asked)) == (StopReason.STOP_STRING, 2)
    assert (transcript.tools.rounds, transcript.tools.executions, transcript.tools.output) == (2, 2, "7\n")


@pytest.mark.parametrize(("code", "executions"), [("```python\nprint(3)\n```", 1), ("```python\nprint(3)\n``", 0)])
def test_a_program_at_the_very_end_of_the_last_round_is_run(sandbox: Sandbox, code: str, executions: int) -> None:
    transcript, _ = play({"": code}, sandbox, rounds=1, max_new_tokens=len(ids_of(code)))
    assert transcript.text == code + "\n```output\n3\n```\n" * executions
    assert (transcript.stop, transcript.tools.executions) == (StopReason.LENGTH, executions)


def test_the_cap_on_all_tokens(sandbox: Sandbox) -> None:
    first = len(ids_of(PROGRAM + "```output"))
    answers = {"": PROGRAM + "```output", "42\n```\n": "abcdefgh<eos>"}
    transcript, backend = play(answers, sandbox, max_total_tokens=first + 5, max_new_tokens=first)
    assert transcript.text == PROGRAM + "```output\n42\n```\nabcde"
    assert (transcript.stop, transcript.tokens) == (StopReason.LENGTH, first + 5)
    assert [asked[0].max_new_tokens for asked in backend.asked] == [first, 5]

    transcript, backend = play(answers, sandbox, max_total_tokens=first)
    assert transcript.text == PROGRAM + "```output\n42\n```\n", "its program is still run"
    assert (transcript.stop, len(backend.asked)) == (StopReason.LENGTH, 1)


# ---- programs


def test_earlier_programs_run_again_without_their_prints(sandbox: Sandbox) -> None:
    first = "```python\nx = 6\nprint(\n    x,\n)\n```\n"
    second = "Now\n```python\nprint(x * 7)\n```\n"
    transcript, _ = play({"": first + "```output", "\n6\n```\n": second + "```output", "42\n```\n": "<eos>"}, sandbox)
    assert [segment.text for segment in transcript.segments[1::2]] == ["```output\n6\n```\n", "```output\n42\n```\n"]


def test_what_a_program_prints_is_never_code(sandbox: Sandbox) -> None:
    first = "```python\nf = '`' * 3\nprint(f, f + 'python', '1 / 0', sep=chr(10))\n```\n"
    second = "```python\nprint(2)\n```\n"
    answers = {"": first + "```output", "1 / 0\n```\n": second + "```output", "\n2\n```\n": "<eos>"}
    transcript, _ = play(answers, sandbox)
    assert transcript.tools.output == "2\n"
    assert python_blocks(transcript.text)[1] == "1 / 0", "as it would look to who reads the whole text"


def test_what_a_program_prints_is_never_a_special_token(sandbox: Sandbox) -> None:
    transcript, backend = play({"": "```python\nprint('<e' 'os>')\n```\n```output", "<eos>\n```\n": "<eos>"}, sandbox)
    assert transcript.text.endswith("```output\n<eos>\n```\n")
    assert EOS not in backend.asked[1][0].prompt_ids


# code, what the model reads, what is counted
RESULTS = [
    ("print('a' * 51 + 'b' * 50)", "a" * 50 + "..." + "b" * 50, (0, 0), "a" * 51 + "b" * 50 + "\n"),
    ("x = 1", "(no output)", (0, 0), ""),
    ("x = y", "NameError: name 'y' is not defined", (1, 0), None),
    ("print(1)\nwhile True: pass", "Runtime errors: timeout, the program was stopped after 1 seconds", (1, 1), None),
]


@pytest.mark.parametrize(("code", "text", "counts", "output"), RESULTS)
def test_results(code: str, text: str, counts: tuple[int, int], output: str | None) -> None:
    hasty = Sandbox(Limits(seconds=1), allow_unconfined=Sandbox.capabilities().missing)
    transcript, _ = play({"": f"```python\n{code}\n```\n```output", "\n```\n": "ok<eos>"}, hasty)
    assert transcript.text.endswith(f"{text}\n```\nok")
    assert (transcript.tools.errors, transcript.tools.timeouts) == counts
    assert (transcript.tools.executions, transcript.tools.output) == (1, output)


def test_the_last_program_says_what_the_output_is(sandbox: Sandbox) -> None:
    answers = {"": PROGRAM + "```output", "42\n```\n": "```python\n1 / 0\n```\n```output", "zero\n```\n": "<eos>"}
    transcript, _ = play(answers, sandbox)
    assert transcript.tools.to_dict() == {"rounds": 3, "executions": 2, "errors": 1, "timeouts": 0, "output": None}


def graded(code: str, gold: str, sandbox: Sandbox) -> GradedAttempt:
    transcript, _ = play({"": f"```python\n{code}\n```\n```output", "\n```\n": "done<eos>"}, sandbox)
    attempt = Attempt("p", 0, transcript.text, 1, transcript.stop, transcript.tools, transcript.segments)
    return grade_attempts({"p": Problem("p", "?", (gold,))}, [attempt], LADDERS["gsm8k"])[0]


# code, gold, the answer, the rule that found it, whether it is right, whether the program's output is
GRADED = [
    ("print('Percent error:', 2 + 2)", "4", "4", Rule.OUTPUT, True, True),
    ("print('timeout', 9)\nprint(4)", "4", "4", Rule.OUTPUT, True, True),
    ("print(chr(96) * 3 + 'output')\nprint(chr(96) * 3)\nprint(4)", "4", "4", Rule.OUTPUT, True, True),
    ("print('x' * 200)\nprint(4)", "4", "4", Rule.OUTPUT, True, True),
    ("raise ValueError('`')", "1", None, None, False, None),  # "line 1" of the traceback is no answer
    ("raise ValueError('no')", "1", None, None, False, None),
    ("x = 8", "8", "8", Rule.LAST_NUMBER, True, False),  # nothing is printed; the number is the model's own
]


@pytest.mark.parametrize(("code", "gold", "answer", "rule", "right", "program"), GRADED)
def test_what_a_program_printed_is_graded_and_not_what_the_transcript_says(
    sandbox: Sandbox, code: str, gold: str, answer: str | None, rule: Rule | None, right: bool, program: bool | None
) -> None:
    row = graded(code, gold, sandbox)
    assert (row.grade.answer, row.grade.rule, row.correct, row.program) == (answer, rule, right, program)


class Meeting:
    """A sandbox whose programs end only when all of a round have begun."""

    limits = Limits()

    def __init__(self, parties: int):
        self.barrier = threading.Barrier(parties, timeout=20)

    def run(self, code: str) -> Execution:
        self.barrier.wait()
        return Execution("42\n", "", 0, "ok", 0.0)


def test_programs_of_a_round_run_side_by_side() -> None:
    backend = ScriptedBackend(table({"": PROGRAM + "```output", "42\n```\n": "<eos>"}))
    found = rounds(backend, Meeting(3), samples=3, workers=3)
    assert [each.tools.output for each in found] == ["42\n"] * 3


def test_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, workers in ((1, 2), (4, 8), (64, 32)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=processors: set(range(n)), raising=False)
        assert tir._workers() == workers


# ---- several rows


def test_samples_go_their_own_ways(sandbox: Sandbox) -> None:
    def script(said: str, sample: int) -> str:
        if said:
            return f"{sample}: done<eos>"
        return ["straight<eos>", "```python\nprint(10)\n```\n```output", "```python\nprint(20)\n```\n```output"][
            sample
        ]

    backend = ScriptedBackend(script)
    prompts = [ids_of("Q?"), ids_of("another one?")]
    found = run_rounds(
        backend,
        TOKENIZER,
        prompts,
        samples=3,
        noise_keys=[5, 6],
        max_new_tokens=100,
        settings=TirSettings(),
        sandbox=sandbox,
    )
    assert [each.tools.output for each in found] == [None, "10\n", "20\n"] * 2
    assert [each.text[-7:] for each in found] == ["traight", "1: done", "2: done"] * 2
    first, second = backend.asked
    assert [(r.prompt_ids, r.count, r.noise_key, r.first_sample) for r in first] == [
        (prompts[0], 3, 5, 0),
        (prompts[1], 3, 6, 0),
    ]
    assert [(r.count, r.noise_key, r.first_sample, r.turn) for r in second] == [
        (1, 5, 1, 1),
        (1, 5, 2, 1),
        (1, 6, 1, 1),
        (1, 6, 2, 1),
    ]


def test_the_first_sample_may_be_a_later_one(sandbox: Sandbox) -> None:
    """The rest of a problem's samples, where a call had no room for all of them."""
    backend = ScriptedBackend(lambda said, sample: f"{sample}<eos>" if said else "```output")
    found = run_rounds(
        backend,
        TOKENIZER,
        [ids_of("Q?")],
        samples=2,
        noise_keys=[5],
        max_new_tokens=100,
        settings=TirSettings(),
        sandbox=sandbox,
        first_sample=3,
    )
    assert [each.text[-1] for each in found] == ["3", "4"]
    asked = [[(r.count, r.noise_key, r.first_sample) for r in requests] for requests in backend.asked]
    assert asked == [[(2, 5, 3)], [(1, 5, 3), (1, 5, 4)]]


def test_no_prompts(sandbox: Sandbox) -> None:
    backend = ScriptedBackend(table({}))
    assert (
        run_rounds(
            backend,
            TOKENIZER,
            [],
            samples=2,
            noise_keys=[],
            max_new_tokens=9,
            settings=TirSettings(),
            sandbox=sandbox,
        )
        == []
    )
    assert backend.asked == []


# ---- ids


def test_the_ids_of_a_round_begin_with_those_of_the_round_before(sandbox: Sandbox) -> None:
    """In pieces that the tokenizer would not have chosen: they are taken as they are."""
    pieces = ["``", "`", "python\n", "p", "rint", "(2)\n", "``", "`\n", "```", "out", "put"]
    _, backend = play({"": pieces, "\n2\n```\n": "<eos>"}, sandbox)
    first, second = (asked[0].prompt_ids for asked in backend.asked)
    assert second == [*first, *ids_of(*pieces), *ids_of("\n2\n```\n")]


def test_a_token_that_reaches_over_the_fence_is_cut(sandbox: Sandbox) -> None:
    pieces = ["``", "`", "python\n", "p", "rint", "(2)\n", "``", "`\n", "```", "out", "put\n4"]
    _, backend = play({"": pieces, "\n2\n```\n": "<eos>"}, sandbox)
    first, second = (asked[0].prompt_ids for asked in backend.asked)
    assert second == [*first, *ids_of(*pieces[:8]), *ids_of("```output\n2\n```\n")]


def byte_tokenizer(*merges: tuple[str, str]) -> Any:
    """One token for each byte, so that heads of a text may end inside a character; and some for two."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES = byte_tokenizer()
WORDS = st.text("ab \n`é答", max_size=12)


@given(said=WORDS, more=WORDS, result=WORDS, whole=st.booleans())
def test_ids_and_text_agree(said: str, more: str, result: str, whole: bool) -> None:
    """Whatever follows the fence, its tokens are gone, and what lies before it is as it was."""
    for tokenizer in (BYTES, TOKENIZER):
        codec = tir._Codec(tokenizer, "```output")
        if tokenizer is TOKENIZER:
            said, more, result = (text.replace("é", "e").replace("答", "A") for text in (said, more, result))
        if whole:
            more = ""
        ids = list(tokenizer(said + "```output" + more, add_special_tokens=False)["input_ids"])
        newline = "" if said.endswith("\n") or not said else "\n"
        output = f"{newline}```output\n{result}\n```\n"
        continued = codec.continued(ids, said, output)
        assert codec.decode(continued) == said + output
        if whole and not newline:
            assert continued[: len(ids)] == ids
        if tokenizer is BYTES:
            assert continued[: len(said.encode())] == ids[: len(said.encode())]


def test_a_token_that_ends_a_character_and_begins_the_fence() -> None:
    tokenizer = byte_tokenizer(("©", "`"))  # the second byte of é, as this kind of tokenizer writes it
    ids = tokenizer("xé```output")["input_ids"]
    assert len(ids) == len("xé```output".encode()) - 1
    codec = tir._Codec(tokenizer, "```output")
    continued = codec.continued(ids, "xé", "\n```output\n7\n```\n")
    assert codec.decode(continued) == "xé\n```output\n7\n```\n"


class Blank:
    """A tokenizer that puts a blank before every text, as some do."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in " " + text]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(map(chr, ids)).removeprefix(" ")


def test_no_blank_comes_before_an_output() -> None:
    tokenizer = Blank()
    ids = tokenizer("ab\n```output")["input_ids"]
    continued = tir._Codec(tokenizer, "```output").continued(ids, "ab\n", "```output\n7\n```\n")
    assert "".join(map(chr, continued)) == " ab\n```output\n7\n```\n"


def caller_tokenizer() -> Any:
    """The demo's tokenizer, in which the token behind `A`, a colon, reads as a program that prints and asks."""
    state = json.loads(AutoTokenizer.from_pretrained(model_path()).backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["\n" + PROGRAM + "```output"] = vocabulary.pop(": ")
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != ": "]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def test_kept_turns_change_nothing_with_the_engine(sandbox: Sandbox) -> None:
    model = in_double(AutoModelForCausalLM.from_pretrained(model_path()))
    plain, tokenizer = AutoTokenizer.from_pretrained(model_path()), caller_tokenizer()
    prompts = [plain(row["prompt"])["input_ids"] for row in load_task()[0].select(range(4))]

    def talk(keep: bool) -> tuple[list[Transcript], list[list[int]], float]:
        config = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.3, eos_token_id=1, pad_token_id=0)
        config.stop_strings = ["```output"]
        backend = BuiltinBackend(lambda: model, config, stop_ids=[1], tokenizer=tokenizer)
        if not keep:
            backend.turns = nullcontext  # type: ignore[method-assign,assignment]
        written: list[list[int]] = []
        sample = backend.sample

        def watched(requests: Sequence[SampleRequest]) -> list[Completion]:
            completions = sample(requests)
            written.extend(list(completion.ids) for completion in completions)
            return completions

        backend.sample = watched  # type: ignore[method-assign]
        found = run_rounds(
            backend,
            tokenizer,
            prompts,
            samples=3,
            noise_keys=[1, 2, 3, 4],
            max_new_tokens=12,
            settings=TirSettings(rounds=4, max_total_tokens=40),
            sandbox=sandbox,
        )
        return found, written, backend.counters["kept_tokens"]

    with_turns, without = talk(True), talk(False)
    assert with_turns[:2] == without[:2]
    assert without[2] == 0 < with_turns[2]
    tools = [transcript.tools for transcript in with_turns[0]]
    assert max(tool.executions for tool in tools) > 1, "or the test says little"
    assert {tool.output for tool in tools} >= {"42\n"}


# ---- mistakes


@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 0},
        {"rounds": True},
        {"rounds": 1.5},
        {"max_total_tokens": 0},
        {"workers": 0},
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TirSettings(**settings)


def test_the_fence_is_no_setting() -> None:
    assert TirSettings().output_stop == OUTPUT_STOP == "```output"
    with pytest.raises(TypeError, match="output_stop"):
        TirSettings(output_stop="```result")  # type: ignore[call-arg]


def test_protections_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="the protections are"):
        TirSettings(allow_unconfined=["nothing"]).open_sandbox()


def test_calls_that_cannot_work(sandbox: Sandbox) -> None:
    deaf = ScriptedBackend(table({}), stops=["\nQ:"])
    with pytest.raises(ConfigError, match=r"does not stop at '```output'.*\['\\nQ:'\]"):
        rounds(deaf, sandbox)
    backend = ScriptedBackend(table({}))
    with pytest.raises(ConfigError, match="samples=0"):
        rounds(backend, sandbox, samples=0)
    with pytest.raises(ConfigError, match="1 prompts but 0 noise_keys"):
        run_rounds(
            backend,
            TOKENIZER,
            [[5]],
            samples=1,
            noise_keys=[],
            max_new_tokens=1,
            settings=TirSettings(),
            sandbox=sandbox,
        )
