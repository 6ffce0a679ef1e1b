"""Tool-integrated reasoning: the model writes a program, reads what it prints and goes on.

    prompt │ Let us compute. ```python … ``` ```output │ 42 ``` │ So the answer is \\boxed{42}. <eos>
           │ model                                     │ output │ model

The model speaks in rounds. It ends one by writing ```output, which is a stop string of the backend: what it would
invent there is never sampled. All of its programs so far are run, the result is put behind the fence, and the next
round begins. What the model wrote is not tokenised again where that can be helped, so that a backend can go on from
the keys and values that it kept.

    ends by            in any round but the last                     in the last round, or with no token left
    end of sequence    finished                                      the same
    ```output          result appended, goes on                      result appended, finished
    another stop       finished; text from that string on is cut     the same
    token limit        goes on where it was                          finished; a program at the very end is run
    anything else      finished                                      the same
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gruppo.errors import ConfigError
from gruppo.evaluation.graders import cores
from gruppo.evaluation.programs import (
    NO_PROGRAM,
    OUTPUT_STOP,
    ProgramResult,
    make_sandbox,
    output_block,
    program,
    python_blocks,
    run_program,
)
from gruppo.evaluation.types import ToolUse
from gruppo.rollout.base import RolloutBackend, stop_strings
from gruppo.sandbox import Sandbox
from gruppo.types import Completion, SampleRequest, StopReason

__all__ = ["OUTPUT_STOP", "Segment", "TirSettings", "Transcript", "run_rounds"]

MOST = 32  # programs that run at one time, unless told


@dataclass(frozen=True)
class TirSettings:
    """How many rounds there are, and how programs run.

    Example, as in the DeepSeekMath paper, which sets no limit to all rounds together:
        TirSettings(rounds=2, max_total_tokens=2 * 1024)
    """

    rounds: int = 4  # times that the model speaks, at most
    max_total_tokens: int = 2048  # written by the model, in all rounds together
    allow_unconfined: Collection[str] = ()  # protections that `open_sandbox` does without; see `Sandbox`
    workers: int | None = None  # programs that run at one time; None: two for each processor, at most 32

    def __post_init__(self) -> None:
        for name in ("rounds", "max_total_tokens", "workers"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"TirSettings({name}={value!r}): give a whole number of at least 1.")

    @property
    def output_stop(self) -> str:
        """The stop string that ends a round."""
        return OUTPUT_STOP

    def open_sandbox(self) -> Sandbox:
        """The place for the programs; raises `SandboxError` where the machine cannot confine them."""
        return make_sandbox(self.allow_unconfined)


class Segment(NamedTuple):
    """A part of a transcript by one author."""

    kind: Literal["model", "output"]
    text: str


@dataclass(frozen=True)
class Transcript:
    """One sample with all of its rounds.

    Example:
        Transcript(
            tokens=31,
            stop=StopReason.EOS,
            tools=ToolUse(rounds=2, executions=1, output="42\\n"),
            segments=(
                Segment("model", "```python\\nprint(6 * 7)\\n```\\n"),
                Segment("output", "```output\\n42\\n```\\n"),
                Segment("model", "So \\\\boxed{42}."),
            ),
        )
    """

    tokens: int  # that the model wrote, those of stop strings included
    stop: StopReason
    tools: ToolUse
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """All of it, as it is scored."""
        return "".join(segment.text for segment in self.segments)


def run_rounds(
    backend: RolloutBackend,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    noise_keys: Sequence[int],
    max_new_tokens: int,
    settings: TirSettings,
    sandbox: Sandbox,
    first_sample: int = 0,
) -> list[Transcript]:
    """`samples` transcripts for each prompt, flat and in order.

    `backend.config.stop_strings` must hold OUTPUT_STOP; other strings there end a transcript.
    `max_new_tokens` is the limit of one round. Sample i of a prompt draws from its noise key and i, counted from
    `first_sample`, as in `SampleRequest`. Rows of a round wait for each other, and its programs run side by side. The
    whole is one block of `backend.turns()`, so it cannot stand in another one.

    Example:
        config.stop_strings = [OUTPUT_STOP]
        run_rounds(backend, tokenizer, [ids], samples=1, noise_keys=[0], max_new_tokens=1024, settings=settings,
                   sandbox=settings.open_sandbox())[0].text
        -> "```python\\nprint(6 * 7)\\n```\\n```output\\n42\\n```\\nSo \\\\boxed{42}."
    """
    _check(backend, prompts, samples, noise_keys, max_new_tokens)
    rows = [
        _Row(prompt, key, first_sample + place)
        for prompt, key in zip(prompts, noise_keys, strict=True)
        for place in range(samples)
    ]
    first = rows[::samples]
    loop = _Loop(settings, _Codec(tokenizer, OUTPUT_STOP), tuple(stop_strings(backend.config)))

    def run(code: str | None) -> ProgramResult:
        return NO_PROGRAM if code is None else run_program(sandbox, code)

    with backend.turns(), ThreadPoolExecutor(settings.workers or _workers()) as pool:
        for number in range(settings.rounds):
            going = [row for row in rows if row.stop is None]
            if not going:
                break
            # In the first round the samples of a prompt are still alike: one request for all of them.
            asking, count = (going, 1) if number else (first, samples)
            requests = _requests(asking, number, count, max_new_tokens, settings.max_total_tokens)
            for row, completion in zip(going, backend.sample(requests), strict=True):
                loop.read(row, completion, last=number + 1 == settings.rounds)
            waiting = [row for row in going if row.waits]
            for row, result in zip(waiting, pool.map(run, [row.code for row in waiting]), strict=True):
                loop.answer(row, result)
    return [row.transcript() for row in rows]


def _check(
    backend: RolloutBackend,
    prompts: Sequence[Sequence[int]],
    samples: int,
    noise_keys: Sequence[int],
    max_new_tokens: int,
) -> None:
    if samples < 1 or max_new_tokens < 1:
        raise ConfigError(f"samples={samples}, max_new_tokens={max_new_tokens}: both must be at least 1.")
    if len(prompts) != len(noise_keys):
        raise ConfigError(f"There are {len(prompts)} prompts but {len(noise_keys)} noise_keys; give one for each.")
    if OUTPUT_STOP not in stop_strings(backend.config):
        raise ConfigError(
            f"The backend does not stop at {OUTPUT_STOP!r}, so that the model would invent what its programs print. "
            f"Add it to the stop_strings of the backend's config, which are {stop_strings(backend.config)!r}."
        )


def _workers() -> int:
    return min(2 * cores(), MOST)


# ---- a row and its rounds


@dataclass
class _Row:
    """A sample under way. A stretch is what the model wrote since the last output, in one round or several."""

    prompt: Sequence[int]
    noise_key: int
    sample: int
    ids: list[int] = field(default_factory=list)  # after the prompt: the model's own, and those of outputs
    begin: int = 0  # where in `ids` the stretch begins
    blocks: list[str] = field(default_factory=list)  # programs of earlier stretches
    segments: list[Segment] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    results: list[ProgramResult] = field(default_factory=list)  # of programs that were run
    stop: StopReason | None = None  # None: goes on
    waits: bool = False  # for the result of `code`
    code: str | None = None  # None: there is nothing to run

    def transcript(self) -> Transcript:
        assert self.stop is not None
        tools = ToolUse(
            rounds=self.rounds,
            executions=len(self.results),
            errors=sum(result.failed for result in self.results),
            timeouts=sum(result.timeout for result in self.results),
            output=self.results[-1].stdout if self.results else None,
        )
        return Transcript(self.tokens, self.stop, tools, tuple(segment for segment in self.segments if segment.text))


def _requests(rows: Sequence[_Row], number: int, count: int, limit: int, total: int) -> list[SampleRequest]:
    return [
        SampleRequest(
            [*row.prompt, *row.ids],
            count,
            noise_key=row.noise_key,
            first_sample=row.sample,
            max_new_tokens=min(limit, total - row.tokens),
            turn=number,
        )
        for row in rows
    ]


@dataclass(frozen=True)
class _Loop:
    """What is done with a completion, and with a result."""

    settings: TirSettings
    codec: "_Codec"
    stops: tuple[str, ...]

    def read(self, row: _Row, completion: Completion, *, last: bool) -> None:
        """Take in what the model wrote in a round, and see what follows.

        Stop strings are looked for in the whole stretch, since one may have begun in the round before: the backend
        did not see that one, and went on.
        """
        row.rounds += 1
        row.tokens += len(completion.ids)
        row.ids += completion.ids
        text = self.codec.decode(row.ids[row.begin :])
        found = min(((text.find(stop), stop) for stop in self.stops if stop in text), default=None)
        spent = row.tokens >= self.settings.max_total_tokens
        if found is not None and found[1] == OUTPUT_STOP:
            self._wait(row, text[: found[0]])
            row.stop = StopReason.LENGTH if spent else StopReason.STOP_STRING if last else None
        elif found is not None:
            self._finish(row, text[: found[0]], StopReason.STOP_STRING)
        elif completion.stop is not StopReason.LENGTH:
            self._finish(row, text, completion.stop)
        elif last or spent:
            if program(text) is None:
                self._finish(row, text, StopReason.LENGTH)
            else:
                self._wait(row, text)
                row.stop = StopReason.LENGTH

    def answer(self, row: _Row, result: ProgramResult) -> None:
        """Put a result behind the stretch that asked for it; the next one begins after that."""
        if row.code is not None:
            row.results.append(result)
        row.waits = False
        said = row.segments[-1].text
        newline = "" if said.endswith("\n") or not said else "\n"
        output = newline + output_block(result.text)
        row.segments.append(Segment("output", output))
        if row.stop is None:
            row.ids[row.begin :] = self.codec.continued(row.ids[row.begin :], said, output)
            row.begin = len(row.ids)

    def _wait(self, row: _Row, said: str) -> None:
        row.segments.append(Segment("model", said))
        row.waits, row.code = True, program(said, row.blocks)
        row.blocks += python_blocks(said)

    def _finish(self, row: _Row, said: str, stop: StopReason) -> None:
        row.segments.append(Segment("model", said))
        row.stop = stop


# ---- ids and text


@dataclass(frozen=True)
class _Codec:
    """Tokens to text and back."""

    tokenizer: Any
    fence: str

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def continued(self, ids: list[int], said: str, output: str) -> list[int]:
        """The ids of a stretch that ended with a fence, and of the output behind it.

        Where the stretch ends with just that fence, its ids stay as they are. Else those stay whose text lies before
        the fence; the fence may have begun inside the one that follows them.

        Example, with one token for each character and `o` for the fence:
            continued(ids of "ab\\no", "ab\\n", "o\\n7\\n") == ids of "ab\\no" + ids of "\\n7\\n"
            continued(ids of "ab\\nox", "ab\\n", "o\\n7\\n") == ids of "ab\\n" + ids of "o\\n7\\n"
        """
        if self.decode(ids) == said + self.fence and output.startswith(self.fence):
            while self.decode(ids[:-1]) == said + self.fence:
                ids = ids[:-1]  # a special token, such as an end of sequence that is none now
            return [*ids, *self._encode(output.removeprefix(self.fence))]
        # Longer heads have longer texts, but for one that ends inside a character.
        count = bisect_right(range(len(ids) + 1), len(said), key=lambda n: len(self.decode(ids[:n]))) - 1
        while not said.startswith(head := self.decode(ids[:count])):
            count -= 1
        return [*ids[:count], *self._encode(said.removeprefix(head) + output)]

    def _encode(self, text: str) -> list[int]:
        """The ids of a text that follows another one.

        Some tokenizers put a blank before a text, so it is encoded behind a fence, which is then taken away.
        """
        before, both = self._ids(self.fence), self._ids(self.fence + text)
        return both[len(before) :] if both[: len(before)] == before else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        # A program may print the name of a special token: that is text like any other.
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
