"""What a rollout backend is: something that answers sample requests."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from gruppo.engine.noise import derive_key
from gruppo.engine.settings import filters, merged_config
from gruppo.policy.sharding import WholeWeights, ready
from gruppo.policy.unwrap import inner_model
from gruppo.types import Completion, SampleRequest, Vision


class RolloutBackend:
    """Samples completions from the current weights of the policy.

    The trainer never knows where sampling runs. `config` is the GenerationConfig that a backend samples with; a
    callback may change it during a run. What follows `sample` has a default: a backend says what it knows.
    """

    name = ""
    config: Any
    policy: Callable[[], Any] | None = None  # returns the module that is sampled from; None where there is none here
    weights_version: int | None = None  # of the weights that the last call sampled from; None: not known
    whole: WholeWeights | None = None  # where the weights that are trained are sharded over processes
    lockstep = False  # every process must call `sample` as often as the others, with something to ask for
    _is_ready = False
    pause: Callable[[], None] = staticmethod(lambda: None)  # called now and then while sampling; may raise to end it
    clock: Callable[[], Any] = staticmethod(lambda: None)  # another value after each update of the weights
    context_length: int | None = None  # tokens of prompt and completion that it has room for; None: the model's
    has_own_weights = False  # it samples from a copy: its log-probs are of another program's arithmetic

    @property
    def needs_every_process(self) -> bool:
        """Whether processes sample together, so that one with nothing to ask for must call `sample` as well."""
        return False

    def refresh(self) -> None:
        """Bring a copy of the weights up to date; all processes call this before each generation."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """`count` completions for each request, flat and in order; the policy is left as it was found."""
        raise NotImplementedError

    def begin(self, requests: Sequence[SampleRequest]) -> Any:
        """Ask for the same without waiting for it, where another program samples; see `vllm.inflight.InFlight`."""
        raise NotImplementedError(f"{type(self).__name__} samples in this process.")

    @contextmanager
    def ready(self) -> Iterator[None]:
        """In here weights that are sharded over processes are at hand; all processes enter it together.

        `sample` enters it by itself, so this is for calls that not every process makes.
        """
        if self._is_ready:
            yield
            return
        self._is_ready = True
        try:
            with ready(self.whole, self.release):
                yield
        finally:
            self._is_ready = False

    def turns(self) -> AbstractContextManager[None]:
        """A block of calls in which completions are gone on with: prompt, completion and what answered it.

        A backend may keep what it knows of them between the calls. The weights stay as they are meanwhile.
        """
        return nullcontext()

    def config_in_effect(self) -> Any:
        """`config` with its gaps filled from the model's own generation config, as sampling fills them."""
        model = None if self.policy is None else inner_model(self.policy())
        return merged_config(self.config, getattr(model, "generation_config", None))

    def filters(self, temperature: float) -> dict[str, Any]:
        """The settings by which it samples from another distribution than the policy's at this temperature."""
        return filters(self.config_in_effect(), temperature)

    @property
    def timer(self) -> str:
        """The name under which dashboards know this phase."""
        return f"{self.name}.generate"

    def metrics(self) -> dict[str, float]:
        """What the last call, or block of turns, has to say for the logs."""
        return {}

    def work(self, prompts: Sequence[int], completions: Sequence[int]) -> dict[str, Any]:
        """What the last call, or block of turns, computed for rows of these lengths, as `Ledger.sampled` takes it."""
        return {}

    def release(self) -> None:
        """Free what is kept between calls; the next call makes it again."""

    def state_dict(self) -> dict[str, Any] | None:
        """What a resumed run needs in order to sample the same, if anything."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


def group_requests(
    prompt_ids: Sequence[Sequence[int]],
    *,
    group_size: int,
    first_row: int = 0,
    key: Sequence[int] = (),
    vision: Sequence[Vision | None] | None = None,
) -> list[SampleRequest]:
    """The requests of one process's rows: one per group, or several where its rows are not of one prompt.

    The first row is row `first_row` of the batch of all processes, and each `group_size` rows of that are a group. Its
    random numbers follow from `key` and its place in that batch, whichever process samples it. `vision` is what a
    processor made of each prompt.

    Example, the second of two processes, which begins inside a group:
        group_requests([[1, 2], [3], [3], [3]], group_size=3, first_row=2)
        -> [SampleRequest([1, 2], 1, noise_key=…, first_sample=2), SampleRequest([3], 3, noise_key=…)]
    """
    requests: list[SampleRequest] = []
    seen = [None] * len(prompt_ids) if vision is None else vision
    for i, (ids, sight) in enumerate(zip(prompt_ids, seen, strict=True)):
        group, sample = divmod(first_row + i, group_size)
        last = requests[-1] if requests else None
        if last is not None and sample and list(last.prompt_ids) == list(ids) and last.vision is sight:
            requests[-1] = replace(last, count=last.count + 1)
        else:
            requests.append(SampleRequest(ids, 1, _noise_key(*key, group), sample, vision=sight))
    return requests


def _noise_key(*words: int) -> int:
    return derive_key(*(word % 2**64 for word in words))  # a seed may be negative


def with_limits_of(requests: Sequence[SampleRequest], config: Any) -> Any:
    """The config for rows that run together under one limit: the largest of the requests' own, where all have one.

    Rows of requests with a lower limit are cut afterwards.
    """
    own = [request.max_new_tokens for request in requests if request.max_new_tokens is not None]
    if len(own) < len(requests) or config.max_new_tokens is None or max(own) >= config.max_new_tokens:
        return config
    lowered = copy.copy(config)
    lowered.max_new_tokens = max(*own, 1)  # generate cannot write nothing
    if config.min_new_tokens is not None:
        lowered.min_new_tokens = min(config.min_new_tokens, lowered.max_new_tokens)
    return lowered


def stop_strings(config: Any) -> list[str]:
    """The strings that end a completion."""
    strings = getattr(config, "stop_strings", None) or []
    return [strings] if isinstance(strings, str) else list(strings)
