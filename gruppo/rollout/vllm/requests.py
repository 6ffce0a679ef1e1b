"""Converts sampling settings and requests to vLLM's format and its answers to ours, the same way for both modes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppo.config.vllm import OWN, RENAMED
from gruppo.engine.noise import derive_key
from gruppo.errors import RolloutError
from gruppo.rollout.base import stop_strings
from gruppo.types import Completion, SampleRequest, StopReason

# The attribute of a GenerationConfig for settings that only vLLM has; a callback that sets another config drops them.
EXTRA = "vllm_settings"


@dataclass(frozen=True)
class Ask:
    """One request to vLLM: `n` completions of a prompt, for the `place`-th of our requests.

    Example:
        Ask(place=0, prompt_ids=[17, 10], n=8, max_tokens=512, seed=93)
    """

    place: int
    prompt_ids: list[int]
    n: int
    max_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Answer:
    """One completion as vLLM describes it."""

    ids: Sequence[int]
    logps: Sequence[float | None] | None
    finish_reason: str | None
    stop_reason: int | str | None = None


def in_two(kwargs: Mapping[str, Any], regex: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """`generation_kwargs` split into fields of a GenerationConfig and settings that only vLLM has.

    Example:
        in_two({"max_tokens": 9, "ignore_eos": True}) -> {"max_new_tokens": 9}, {"ignore_eos": True}
    """
    fields = {RENAMED.get(name, name): value for name, value in kwargs.items() if name not in OWN}
    extra = {name: value for name, value in kwargs.items() if name in OWN}
    return fields, extra if regex is None else extra | {"structured_outputs": {"regex": regex}}


def sampling_settings(config: Any, *, stop_ids: Sequence[int], logps: bool) -> dict[str, Any]:
    """A GenerationConfig as vLLM's settings, except for the length. Fields that are None get vLLM's neutral values.

    Example:
        sampling_settings(GenerationConfig(temperature=0.7, do_sample=True), stop_ids=[2], logps=True) ->
            {"temperature": 0.7, "top_p": 1.0, "top_k": 0, …, "stop_token_ids": [2], "logprobs": 0}
    """

    def field(name: str, neutral: Any) -> Any:
        value = getattr(config, name, None)
        return neutral if value is None else value

    extra = dict(getattr(config, EXTRA, None) or {})
    settings: dict[str, Any] = {
        "temperature": field("temperature", 1.0) if is_random(config) else 0.0,
        "top_p": field("top_p", 1.0),
        "top_k": field("top_k", 0),
        "min_p": field("min_p", 0.0),
        "repetition_penalty": field("repetition_penalty", 1.0),
        "presence_penalty": 0.0,  # since vLLM 0.31 a server takes those of its generation config if there are none
        "frequency_penalty": 0.0,
        "stop_token_ids": [] if extra.get("ignore_eos") else list(stop_ids),
    }
    if strings := stop_strings(config):
        settings["stop"] = strings
    if least := field("min_new_tokens", 0):
        settings["min_tokens"] = least
    if logps:
        settings["logprobs"] = 0  # of the sampled token alone
    return settings | extra


def is_random(config: Any) -> bool:
    """Whether tokens are sampled; greedy decoding takes one sample per request."""
    return bool(config.do_sample) and config.temperature != 0


def asks_of(
    requests: Sequence[SampleRequest], config: Any, *, context_length: int | None, seeded: bool
) -> tuple[list[Ask], list[int]]:
    """The requests for vLLM, and the indices of our requests that have no room for a token.

    vLLM seeds completion i of a request with the request's seed plus i, so a sample draws the same random numbers
    whichever process requests it.
    """
    asks, without_room = [], []
    for place, request in enumerate(requests):
        ids = list(request.prompt_ids)
        room = math.inf if context_length is None else context_length - len(ids)
        limit = min(request.limit(config.max_new_tokens), room)
        if limit < 1:
            without_room.append(place)
            continue
        together = request.count if is_random(config) else 1
        for _ in range(request.count // together if together else 0):
            asks.append(Ask(place, ids, together, int(limit), _seed(request) if seeded else None))
    return asks, without_room


def _seed(request: SampleRequest) -> int | None:
    if request.noise_key is None:
        return None
    return derive_key(request.noise_key, request.turn) % 2**62 + request.first_sample


def completions_of(
    requests: Sequence[SampleRequest],
    asks: Sequence[Ask],
    answers: Sequence[Sequence[Answer]],
    *,
    stop_ids: Sequence[int],
    pad_id: int | None,
) -> list[Completion]:
    """The completions of all requests, flat and in order; requests that were not sent had no room for a token."""
    found: dict[int, list[Completion]] = {}
    for ask, given in zip(asks, answers, strict=True):
        if len(given) != ask.n:
            raise RolloutError(f"vLLM returned {len(given)} completions for a request for {ask.n}.")
        found.setdefault(ask.place, []).extend(completion(answer, stop_ids, pad_id) for answer in given)
    none = Completion([], StopReason.NO_ROOM)
    return [each for i, request in enumerate(requests) for each in found.get(i, [none] * request.count)]


def completion(answer: Answer, stop_ids: Sequence[int], pad_id: int | None = None) -> Completion:
    """One completion with the reason it ended; missing log-probs count as unknown."""
    ids = list(answer.ids)
    if answer.finish_reason not in ("stop", "length", "repetition"):
        raise RolloutError(
            f"vLLM ended a completion of {len(ids)} tokens with {answer.finish_reason!r}. Its log says why; requests "
            "are aborted when the server shuts down, sleeps or is paused."
        )
    if answer.logps is not None and len(answer.logps) != len(ids):
        raise RolloutError(f"vLLM returned {len(answer.logps)} log-probs for {len(ids)} tokens.")
    # If the model itself wrote a padding token last, that counts as an end, as with the other backends.
    stop = StopReason.EOS if ids and ids[-1] == pad_id else StopReason.LENGTH
    if answer.finish_reason == "stop":
        by_string = isinstance(answer.stop_reason, str) and (not ids or ids[-1] not in stop_ids)
        stop = StopReason.STOP_STRING if by_string else StopReason.EOS
    return Completion(ids, stop, None if answer.logps is None else list(answer.logps))


# ---- the two forms of a request and its answer


def with_lengths_of(ask: Ask, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for one request: where there is less room than `min_tokens`, the minimum is the room."""
    least = {"min_tokens": min(settings["min_tokens"], ask.max_tokens)} if "min_tokens" in settings else {}
    return {**settings, "n": ask.n, "max_tokens": ask.max_tokens, **least}


def http_request(ask: Ask, settings: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The body of POST /v1/completions."""
    body = with_lengths_of(ask, settings) | {"model": model, "prompt": ask.prompt_ids}
    # Tokens are decoded here. The server must not skip special tokens, or it could miss a stop string.
    body |= {"return_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False}
    return body if ask.seed is None else body | {"seed": ask.seed}


def http_answers(reply: Mapping[str, Any]) -> list[Answer]:
    """The choices of a reply to `http_request`."""
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if any(choice.get("token_ids") is None for choice in choices):
        raise RolloutError("The server returned text without token ids: trainers cannot sample from it.")
    return [
        Answer(
            choice["token_ids"],
            None if choice.get("logprobs") is None else choice["logprobs"]["token_logprobs"],
            choice["finish_reason"],
            choice.get("stop_reason"),
        )
        for choice in choices
    ]


def engine_answers(output: Any) -> list[Answer]:
    """The outputs of one RequestOutput of the engine in this process."""
    return [
        Answer(
            list(each.token_ids),
            None if each.logprobs is None else [_logp(at, token) for token, at in _pairs(each)],
            each.finish_reason,
            each.stop_reason,
        )
        for each in sorted(output.outputs, key=lambda each: each.index)
    ]


def _pairs(output: Any) -> list[tuple[int, Any]]:
    if len(output.token_ids) != len(output.logprobs):
        raise RolloutError(f"vLLM returned {len(output.logprobs)} log-probs for {len(output.token_ids)} tokens.")
    return list(zip(output.token_ids, output.logprobs, strict=True))


def _logp(at: Any, token: int) -> float | None:
    """NaN counts as unknown; the sampled token is always among those returned."""
    value = None if at is None else float(at[token].logprob)
    return None if value is None or math.isnan(value) else value
