"""The requests of a call, checked and grouped by prompt before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gruppo.engine.noise import derive_key
from gruppo.engine.scheduler import PromptWork
from gruppo.errors import RolloutError
from gruppo.types import SampleRequest

Name = tuple[int, int]  # the noise key and the number of a sample: the same for all turns of a completion

_BY_PLACE = 2**63  # separates keys derived from a request's number from those that are given


@dataclass
class Work:
    """Distinct prompts, and for each completion the key of its noise, its token limit and its name, if it has one.

    Example, two completions of one prompt in a context of 8 tokens:
        Work.of([SampleRequest([5, 6, 7], 2)], 16, 100, 8).limits == [5, 5]
    """

    prompts: list[PromptWork] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)  # 0: there is no room
    names: list[Name | None] = field(default_factory=list)

    @property
    def completions(self) -> int:
        return len(self.keys)

    @property
    def runnable(self) -> list[PromptWork]:
        return [prompt for prompt in self.prompts if prompt.owed]

    @property
    def mean_limit(self) -> int:
        """The mean token limit of the completions that have room, rounded up."""
        limits = [limit for limit in self.limits if limit]
        return -(-sum(limits) // max(len(limits), 1))

    @property
    def shared_tokens(self) -> float:
        """The mean length of the prefixes; 0 where prompts are hardly shared, as in later turns."""
        prompts = self.runnable
        if sum(len(prompt.owed) for prompt in prompts) < 2 * len(prompts):
            return 0.0
        return sum(prompt.prefix_length for prompt in prompts) / max(len(prompts), 1)

    @classmethod
    def of(
        cls, requests: Sequence[SampleRequest], max_new_tokens: int, vocabulary: int, context: int | None
    ) -> "Work":
        """Number the completions in the order of the requests, and find the prompts they share."""
        prompts: dict[tuple[int, ...], PromptWork] = {}
        work = cls()
        for number, request in enumerate(requests):
            ids = tuple(int(token) for token in request.prompt_ids)
            _check(ids, number, vocabulary)
            room = max_new_tokens if context is None else max(min(max_new_tokens, context - len(ids)), 0)
            limit = request.limit(room)
            prompt = prompts.setdefault(ids, PromptWork(ids, limit))
            prompt.tail_tokens = max(prompt.tail_tokens, limit)
            for i in range(request.count):
                if limit:
                    prompt.owed.append(work.completions)
                work.keys.append(_noise_key(request, number, request.first_sample + i))
                work.limits.append(limit)
                key = request.noise_key
                work.names.append(None if key is None else (key, request.first_sample + i))
        work.prompts = list(prompts.values())
        return work


def _check(ids: Sequence[int], number: int, vocabulary: int) -> None:
    if not ids:
        raise RolloutError(f"Prompt {number} is empty, so there is nothing to predict the first token from.")
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RolloutError(
                f"Prompt {number} has the token id {token}, but the model's vocabulary has {vocabulary} tokens."
            )


def _noise_key(request: SampleRequest, number: int, sample: int) -> int:
    """The noise key of a completion; that of a first turn is the same whether or not other turns follow."""
    stream = derive_key(_BY_PLACE, number) if request.noise_key is None else request.noise_key
    return _signed(derive_key(stream, sample, *([request.turn] if request.turn else [])))


def _signed(key: int) -> int:
    """A 64-bit key as the int64 with the same bits."""
    return key - (1 << 64) if key >= 1 << 63 else key
