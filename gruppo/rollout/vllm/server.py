"""Sampling from a vLLM server.

Every process requests its own completions from the server; only the main one sends weights. The instance id of the
server is read before and after each call, so that samples are used only if they come from the server that the weights
were sent to. If the server restarted in between, or another trainer of this process has sent it other weights, it is
sent the weights again, and the requests are repeated.

`begin` sends requests without waiting. While they are pending, no weights are sent: the requests would be answered
partly from old and partly from new weights.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from gruppo.config.vllm import GROUP_PORT
from gruppo.errors import ConfigError, RolloutError
from gruppo.policy.loading import model_name
from gruppo.policy.unwrap import inner_model
from gruppo.rollout.vllm.base import VLLMBackend, raise_on_all, walked
from gruppo.rollout.vllm.claims import claim
from gruppo.rollout.vllm.client import Line, ServerDownError, ServerFacts, VLLMClient
from gruppo.rollout.vllm.inflight import InFlight, abandon
from gruppo.rollout.vllm.requests import Answer, Ask, http_answers, http_request
from gruppo.rollout.vllm.threads import all_at_once
from gruppo.rollout.vllm.transfer import Sender, Weights, make_sender, push
from gruppo.types import SampleRequest

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256  # calls; each may be for a whole group
RESTARTS = 2  # in one call of `sample`


class VLLMServerBackend(VLLMBackend):
    """Samples from a stock server that was started with `gruppo vllm-serve`."""

    def __init__(
        self,
        policy: Callable[[], Any],
        config: Any,
        *,
        stop_ids: Sequence[int],
        client: VLLMClient,
        start_timeout: float = 240.0,
        group_port: int = GROUP_PORT,
        seeded: bool = True,
    ):
        super().__init__(policy, config, stop_ids=stop_ids, seeded=seeded)
        self.client, self.start_timeout = client, start_timeout
        client.wait_until_up(start_timeout)
        facts = client.facts()
        check_server(facts, client.url, model_name(inner_model(policy())))
        self.sender = make_sender(client, facts, group_port=group_port) if _is_main() else None
        self._adopt(facts)
        self._copy: object = None  # the last copy that this backend sent; see Claim
        self._in_flight: InFlight | None = None  # the latest; it may be complete
        self._restarted = False  # the server restarted and has not been sent the weights since

    # ---- weights

    def _is_stale(self) -> bool:
        self._notice_restart()
        return self._claim.copy is not self._copy or super()._is_stale()

    def _notice_restart(self) -> None:
        """Detect a restarted server, which has the weights from its folder instead of ours."""
        self.client.wait_until_up(self.start_timeout, self.pause)
        if self.client.instance() == self.facts.instance:
            return
        logger.warning(f"The vLLM server at {self.client.url} was restarted and has lost the weights.")
        self.forget()
        self._restarted = True
        facts = self.client.facts()
        check_server(facts, self.client.url, model_name(inner_model(self.policy())))
        self._adopt(facts)

    def _adopt(self, facts: ServerFacts) -> None:
        """Use this server from now on; raises if another process on this machine holds it."""
        self._claim = claim(self.client.url, facts.instance, exclusive=_is_main())
        self.facts, self.context_length = facts, facts.context_length

    def _why_stale(self) -> str:
        return self._cannot_send("was restarted") if self._restarted else super()._why_stale()

    def _cannot_send(self, what: str) -> str:
        return (
            f"The vLLM server at {self.client.url} {what}. With several processes the weights cannot be sent again "
            "automatically; resume from the last checkpoint."
        )

    def _renew(self) -> None:
        self._settle()
        PartialState().wait_for_everyone()  # no process has a pending request
        self._agree_on_server()
        self._restarted = False
        sender = self.sender
        with self._claim.sending(sender) as self._copy:
            walked(self.policy(), None if sender is None else lambda weights: self._push(sender, weights))

    def _push(self, sender: Sender, weights: Weights) -> None:
        with self.working("sending weights"):
            push(self.client, sender, self.facts, weights)

    def _agree_on_server(self) -> None:
        """Make all processes use the server instance that the main one sees now, in case it has just restarted."""
        if PartialState().num_processes == 1:
            return
        error: RolloutError | ConfigError | None = None
        if _is_main():
            try:
                self._notice_restart()
            except (RolloutError, ConfigError) as failure:
                error = failure
        raise_on_all(error)
        self._adopt(broadcast_object_list([self.facts])[0])

    def _settle(self) -> None:
        if self._in_flight is not None:
            with self.working("waiting for rollouts"):
                self._in_flight.settle(self.pause)
            self._in_flight = None

    # ---- samples

    def begin(self, requests: Sequence[SampleRequest]) -> InFlight:
        """Request completions from the policy's current weights without waiting for them; see `InFlight`."""
        self._settle()
        self._ensure_fresh()
        asks, settings = self._words(requests)
        calls, line = self._calls(asks, settings)
        self._in_flight = InFlight(
            requests,
            self.clock(),
            calls,
            lambda replies: self._completions(requests, asks, [http_answers(reply) for reply in replies]),
            self._changes(),
            line.hang_up,
        )
        return self._in_flight

    def _ask(self, asks: Sequence[Ask], settings: dict[str, Any]) -> list[list[Answer]]:
        what = ""
        for _ in range(RESTARTS + 1):
            self._ensure_fresh()
            changed = self._changes()
            try:
                answers = self._answers(asks, settings)
                what = changed()
                if not what:
                    return answers
            except ServerDownError as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise  # the server is up but too slow: a retry would only add load
                what = f"became unreachable while sampling ({error})"
            if PartialState().num_processes > 1:
                raise RolloutError(self._cannot_send(what))
            logger.warning(f"The vLLM server at {self.client.url} {what}; retrying once it is available.")
        raise RolloutError(
            f"Sampling from the vLLM server at {self.client.url} failed {RESTARTS + 1} times in one generation. The "
            f"last time, the server {what}."
        )

    def _changes(self) -> Callable[[], str]:
        """A function that reports what has since made the server sample from other weights, or an empty string."""
        held, copy = self._claim, self._copy

        def since() -> str:
            if self.client.instance() != held.instance:
                return "was restarted while sampling"
            return "received the weights of another trainer while sampling" if held.copy is not copy else ""

        return since

    def _answers(self, asks: Sequence[Ask], settings: dict[str, Any]) -> list[list[Answer]]:
        calls, line = self._calls(asks, settings)
        try:
            return [http_answers(self._waited(call)) for call in calls]
        except BaseException:  # an interrupt, for one: weights must not be sent while requests are pending
            abandon(calls, line.hang_up)
            raise

    def _calls(self, asks: Sequence[Ask], settings: dict[str, Any]) -> "tuple[list[Future[dict[str, Any]]], Line]":
        """Send the requests; the line cancels those without an answer."""
        line, bodies = Line(), [http_request(ask, settings, self.facts.model) for ask in asks]
        return all_at_once(lambda body: self.client.complete(body, line), bodies, MOST_AT_ONCE), line

    def _waited(self, call: "Future[dict[str, Any]]") -> dict[str, Any]:
        while not wait([call], timeout=1.0).done:
            self.pause()
        return call.result()


def _is_main() -> bool:
    return bool(PartialState().is_main_process)


def check_server(facts: ServerFacts, url: str, policy: str) -> None:
    """Raise for a server that the trainer cannot sample from."""
    if not policy:
        logger.warning(
            f"The policy has no name or folder, so it cannot be compared with the model that the server at {url} "
            f"serves, {facts.model!r}."
        )
    elif not any(_is_same(policy, served) for served in (facts.model, facts.root)):
        raise ConfigError(
            f"The server at {url} serves {facts.model!r} (from {facts.root!r}), but the policy is {policy!r}. Start "
            f"it with `gruppo vllm-serve {policy}`. If it serves a copy of the policy from another path, add "
            f"--served-model-name {policy}."
        )
    if facts.api_processes != 1:
        raise ConfigError(
            f"The server at {url} has {facts.api_processes} API processes, each with its own instance id, so "
            "restarts cannot be detected. Start it with `gruppo vllm-serve MODEL`, or with --api-server-count 1."
        )
    if facts.connector is not None:
        logger.warning(
            f"The server at {url} also keeps KV cache outside the engine ({facts.connector}). Every weight transfer "
            "requests that it be cleared, but vLLM does not report whether that happened, and not every connector "
            "supports it: entries computed with old weights may be used. Start it without --kv-transfer-config "
            "and --kv-offloading-size."
        )
    if facts.logprobs_mode != "processed_logprobs":
        raise ConfigError(
            f"The server at {url} returns {facts.logprobs_mode!r}, but drift metrics and the importance-sampling "
            "correction need log-probs of the distribution that it samples from. Start it with "
            "`gruppo vllm-serve MODEL`, or with --logprobs-mode processed_logprobs."
        )
    if facts.generation_config != "vllm" or facts.overrides:
        raise ConfigError(
            f"The server at {url} takes sampling settings and limits of length from a generation config, which the "
            "trainer does not know. Start it with `gruppo vllm-serve MODEL`, or with --generation-config vllm and "
            "without --override-generation-config."
        )


def _is_same(policy: str, served: str) -> bool:
    """Whether two names can refer to the same model, as far as the names show.

    Hub names are compared in full, and so are absolute folders. A folder and a hub name, or a folder relative to where
    the server was started, are compared by their last component only.
    """
    if _is_of_the_hub(policy) and _is_of_the_hub(served):
        return policy == served
    folder = Path(policy).resolve() if Path(policy).is_dir() else Path(policy)
    if folder.is_absolute() and Path(served).is_absolute():
        return folder.resolve() == Path(served).resolve()
    return _last(policy) == _last(served)


def _is_of_the_hub(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return (
        bool(owner and slash and model) and "/" not in model and owner not in (".", "..") and not Path(name).is_dir()
    )


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
