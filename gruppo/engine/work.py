"""What a call asks for, checked and sorted before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gruppo.engine.noise import derive_key
from gruppo.engine.scheduler import PromptWork
from gruppo.errors import RolloutError
from gruppo.types import SampleRequest

_BY_PLACE = 2**63  # sets keys made of a request's number apart from those that are given


@dataclass
class Work:
    """Distinct prompts, and for each completion the key of its noise and its token limit.

    Example, two completions of one prompt in a context of 8 tokens:
        Work.of([SampleRequest([5, 6, 7], 2)], 16, 100, 8).limits == [5, 5]
    """

    prompts: list[PromptWork] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)  # 0: the prompt leaves no room

    @property
    def completions(self) -> int:
        return len(self.keys)

    @property
    def runnable(self) -> list[PromptWork]:
        return [prompt for prompt in self.prompts if prompt.owed]

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
            limit = max_new_tokens if context is None else max(min(max_new_tokens, context - len(ids)), 0)
            prompt = prompts.setdefault(ids, PromptWork(ids, limit))
            for i in range(request.count):
                if limit:
                    prompt.owed.append(work.completions)
                stream = derive_key(_BY_PLACE, number) if request.noise_key is None else request.noise_key
                work.keys.append(_signed(derive_key(stream, request.first_sample + i)))
                work.limits.append(limit)
        work.prompts = list(prompts.values())
        return work


def _check(ids: Sequence[int], number: int, vocabulary: int) -> None:
    if not ids:
        raise RolloutError(f"Prompt {number} is empty, so nothing predicts its first token.")
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RolloutError(
                f"Prompt {number} has the token id {token}, but the model's vocabulary has {vocabulary} tokens."
            )


def _signed(key: int) -> int:
    """A 64-bit key as the int64 with the same bits."""
    return key - (1 << 64) if key >= 1 << 63 else key
