"""The interface of rollout backends, which answer sample requests."""

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

    The trainer does not know where sampling runs. `config` is the GenerationConfig that a backend samples with; a
    callback may change it during a run. A backend must implement `sample`; the other methods have defaults.
    """

    name = ""
    config: Any
    policy: Callable[[], Any] | None = None  # returns the module to sample from; None if this process has none
    weights_version: int | None = None  # of the weights that the last call sampled from; None: unknown
    whole: WholeWeights | None = None  # set if the trained weights are sharded over processes
    lockstep = False  # all processes must call `sample` equally often, each time with at least one request
    _is_ready = False
    pause: Callable[[], None] = staticmethod(lambda: None)  # called periodically while sampling; may raise to stop it
    # A context in which a process works by itself, with the name of what it does, for those that wait for it.
    working: Callable[[str], AbstractContextManager[None]] = staticmethod(lambda phase: nullcontext())
    clock: Callable[[], Any] = staticmethod(lambda: None)  # returns a new value after each update of the weights
    context_length: int | None = None  # most tokens of prompt and completion together; None: the model's limit
    has_own_weights = False  # it samples from a copy, so its log-probs come from another program's arithmetic

    @property
    def needs_every_process(self) -> bool:
        """Whether processes sample together, so that a process without requests must call `sample` too."""
        return False

    def refresh(self) -> None:
        """Bring a copy of the weights up to date; all processes call this before each generation."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """`count` completions for each request, flat and in order; the policy is left as it was found."""
        raise NotImplementedError

    def begin(self, requests: Sequence[SampleRequest]) -> Any:
        """Like `sample`, without waiting, where another program does the sampling; see `vllm.inflight.InFlight`."""
        raise NotImplementedError(
            f"{type(self).__name__} samples in this process, so it cannot sample in the background."
        )

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Within this context, sharded weights are gathered; all processes must enter it together.

        `sample` enters it by itself. Enter it explicitly around calls that not every process makes.
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
        """A context for multi-turn sampling: later prompts extend an earlier prompt, its completion and the reply.

        A backend may keep state between these calls. The weights do not change in the meantime.
        """
        return nullcontext()

    def config_in_effect(self) -> Any:
        """`config` with its gaps filled from the model's own generation config, as sampling fills them."""
        model = None if self.policy is None else inner_model(self.policy())
        return merged_config(self.config, getattr(model, "generation_config", None))

    def filters(self, temperature: float) -> dict[str, Any]:
        """The settings that make the sampling distribution differ from the policy's at this temperature."""
        return filters(self.config_in_effect(), temperature)

    @property
    def timer(self) -> str:
        """The name of this phase in dashboards."""
        return f"{self.name}.generate"

    def metrics(self) -> dict[str, float]:
        """Metrics of the last call, or block of turns, for the logs."""
        return {}

    def work(self, prompts: Sequence[int], completions: Sequence[int]) -> dict[str, Any]:
        """The work of the last call, or block of turns, on rows of these lengths, as arguments of `Ledger.sampled`."""
        return {}

    def release(self) -> None:
        """Free the state kept between calls; the next call rebuilds it."""

    def state_dict(self) -> dict[str, Any] | None:
        """The state that a resumed run needs in order to sample the same completions, if any."""
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
    """The requests for one process's rows: one per group, or several if a group's rows have different prompts.

    The first row is row `first_row` of the global batch, in which every `group_size` rows form a group. The random
    numbers of a row depend on `key` and its position in the global batch, whichever process samples it. `vision` is
    the processor's output for each prompt.

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
    """The config for sampling all requests in one batch, under the largest of their limits if each has one.

    Rows of requests with a lower limit are truncated afterwards.
    """
    own = [request.max_new_tokens for request in requests if request.max_new_tokens is not None]
    if len(own) < len(requests) or config.max_new_tokens is None or max(own) >= config.max_new_tokens:
        return config
    lowered = copy.copy(config)
    lowered.max_new_tokens = max(*own, 1)  # generate writes at least one token
    if config.min_new_tokens is not None:
        lowered.min_new_tokens = min(config.min_new_tokens, lowered.max_new_tokens)
    return lowered


def stop_strings(config: Any) -> list[str]:
    """The strings that end a completion."""
    strings = getattr(config, "stop_strings", None) or []
    return [strings] if isinstance(strings, str) else list(strings)
