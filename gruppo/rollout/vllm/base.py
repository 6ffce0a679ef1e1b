"""Decides when the weights must be sent to vLLM again, and tracks which weights it holds."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from gruppo.config.vllm import SHAPING
from gruppo.engine.settings import merged_config
from gruppo.errors import RolloutError
from gruppo.policy.adapters import adapter_states
from gruppo.policy.modes import weights_version
from gruppo.policy.weights import check_copyable, named_weights
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.vllm.requests import EXTRA, Answer, Ask, asks_of, completions_of, sampling_settings
from gruppo.types import Completion, SampleRequest

__all__ = ["VLLMBackend", "raise_on_all"]


class VLLMBackend(RolloutBackend):
    """Samples from a copy of the policy that vLLM holds.

    The copy is renewed before a call if the policy's weights have changed since. The state of the copy is known only
    once every step of the renewal has been acknowledged. If a step fails, the state is unknown, and the next call
    sends all weights again.
    """

    policy: Callable[[], Any]
    name = "vLLM"
    has_own_weights = True

    def __init__(
        self,
        policy: Callable[[], Any],
        config: Any,
        *,
        stop_ids: Sequence[int],
        logps: bool = True,
        seeded: bool = True,
    ):
        self.policy = policy
        self.config = config
        self.stop_ids = tuple(sorted(stop_ids))
        self.logps, self.seeded = logps, seeded
        self._held: tuple[Any, ...] | None = None  # the policy's state (`_now`) at the last copy; None: unknown
        self._sync_seconds: float | None = None
        check_copyable(policy())

    def config_in_effect(self) -> Any:
        """The model's own generation config is not read."""
        return merged_config(self.config, None)

    def filters(self, temperature: float) -> dict[str, Any]:
        extra = getattr(self.config, EXTRA, None) or {}
        return super().filters(temperature) | {name: value for name, value in extra.items() if name in SHAPING}

    # ---- weights

    def _now(self) -> tuple[Any, ...]:
        """A key that changes whenever the policy's effective weights change.

        It covers in-place writes, updates of the run, and how adapters are applied: which ones, with which scale, or
        none.
        """
        policy = self.policy()
        return weights_version(policy), adapter_states(policy), self.clock()

    def refresh(self) -> None:
        """Renew the copy if the policy has changed since it was made; all processes call this together."""
        if _any_process(self._is_stale()):
            self._refresh()

    def _refresh(self) -> None:
        start = time.perf_counter()
        self.forget()
        self._renew()
        self._held = self._now()  # merging adapters may count as writing
        self.weights_version = self._held[0]
        self._sync_seconds = time.perf_counter() - start

    def _is_stale(self) -> bool:
        return self._held is None or self._held != self._now()

    def _ensure_fresh(self) -> None:
        """Renew a stale copy; with several processes raise instead, since this process cannot renew it alone."""
        if PartialState().num_processes == 1:
            self.refresh()
        elif self._is_stale():
            raise RolloutError(self._why_stale())

    def _why_stale(self) -> str:
        return (
            "The weights in vLLM differ from the policy's. With several processes all of them must update vLLM "
            "together: call trainer.backend.refresh() on each before sampling."
        )

    def forget(self) -> None:
        """Mark the state of the copy as unknown."""
        self._held = self.weights_version = None

    def _renew(self) -> None:
        """Send all weights. Raises on every process if it fails on one."""
        raise NotImplementedError

    # ---- samples

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        asks, settings = self._words(requests)
        return self._completions(requests, asks, self._ask(asks, settings))

    def _words(self, requests: Sequence[SampleRequest]) -> tuple[list[Ask], dict[str, Any]]:
        """The requests and the sampling settings for vLLM."""
        asks, _ = asks_of(requests, self.config, context_length=self.context_length, seeded=self.seeded)
        return asks, sampling_settings(self.config, stop_ids=self.stop_ids, logps=self.logps)

    def _completions(
        self, requests: Sequence[SampleRequest], asks: Sequence[Ask], answers: Sequence[Sequence[Answer]]
    ) -> list[Completion]:
        return completions_of(
            requests, asks, answers, stop_ids=self.stop_ids, pad_id=getattr(self.config, "pad_token_id", None)
        )

    def _ask(self, asks: Sequence[Ask], settings: dict[str, Any]) -> list[list[Answer]]:
        """The answers to each request, sampled from the policy's current weights."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Seconds spent on renewing the copy, if it was renewed since the last call of this method."""
        seconds, self._sync_seconds = self._sync_seconds, None
        return {} if seconds is None else {"rollout/sync_seconds": seconds}


def walked(policy: Any, send: Callable[[Any], None] | None) -> None:
    """Pass the weights to `send`; without it, only take part in gathering them.

    A process whose `send` fails still iterates to the end, because the others wait for its shard of each tensor.
    """
    walk = named_weights(policy)
    error: Exception | None = None
    if send is not None:
        try:
            send(walk)
        except Exception as failure:  # of any kind: the other processes must be told
            error = failure
    for _ in walk:
        pass
    raise_on_all(error)


def raise_on_all(error: Exception | None) -> None:
    """Raise the main process's error on all processes, so that none waits for one that has failed."""
    if PartialState().num_processes > 1:
        said = broadcast_object_list([None if error is None else str(error)])[0]
        if error is None and said is not None:
            error = RolloutError(f"On the main process: {said}")
    if error is not None:
        raise error


def _any_process(flag: bool) -> bool:
    return any(gather_object([flag])) if PartialState().num_processes > 1 else flag
