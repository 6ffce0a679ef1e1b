"""What a rollout backend is: something that answers sample requests."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from gruppo.types import Completion, SampleRequest

# Fields of a GenerationConfig that are neutral at 1, and those that change nothing about what is sampled.
_NEUTRAL_AT_ONE = {
    "encoder_repetition_penalty",
    "guidance_scale",
    "length_penalty",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "temperature",
    "top_p",
    "typical_p",
}
_WITHOUT_EFFECT = {"_from_model_config", "bos_token_id", "disable_compile", "pad_token_id", "transformers_version"}


class RolloutBackend(Protocol):
    """Samples completions from the current weights of the policy.

    The trainer never knows where sampling runs. A backend returns, for requests in order, `count` completions each,
    flat and in order; it leaves the policy as it found it. `config` is the GenerationConfig that it samples with; a
    callback may change it during a run.
    """

    name: str
    config: Any

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]: ...


def group_requests(
    prompt_ids: Sequence[Sequence[int]], *, group_size: int, first_row: int = 0, key: Sequence[int] = ()
) -> list[SampleRequest]:
    """The requests of one process's rows: one per group, or several where its rows are not of one prompt.

    The first row is row `first_row` of the batch of all processes, and each `group_size` rows of that are a group. Its
    random numbers follow from `key` and its place in that batch, whichever process samples it.

    Example, the second of two processes, which begins inside a group:
        group_requests([[1, 2], [3], [3], [3]], group_size=3, first_row=2)
        -> [SampleRequest([1, 2], 1, noise_key=…, first_sample=2), SampleRequest([3], 3, noise_key=…)]
    """
    requests: list[SampleRequest] = []
    for row, ids in enumerate(prompt_ids, first_row):
        group, sample = divmod(row, group_size)
        last = requests[-1] if requests else None
        if last is not None and sample and list(last.prompt_ids) == list(ids):
            requests[-1] = SampleRequest(last.prompt_ids, last.count + 1, last.noise_key, last.first_sample)
        else:
            requests.append(SampleRequest(ids, 1, _noise_key(*key, group), sample))
    return requests


def _noise_key(*words: int) -> int:
    from gruppo.engine.noise import derive_key

    return derive_key(*(word % 2**64 for word in words)) % 2**64


def stop_strings(config: Any) -> list[str]:
    """The strings that end a completion."""
    strings = getattr(config, "stop_strings", None) or []
    return [strings] if isinstance(strings, str) else list(strings)


def settings_besides(config: Any, known: Collection[str]) -> list[str]:
    """`name=value` of each setting of a GenerationConfig that has an effect and is not in `known`."""
    return [
        f"{name}={value!r}"
        for name, value in config.to_dict().items()
        if name not in known and name not in _WITHOUT_EFFECT and not _is_neutral(name, value)
    ]


def _is_neutral(name: str, value: Any) -> bool:
    if name == "use_cache":
        return value is not False
    return value is None or not value or (name in _NEUTRAL_AT_ONE and value == 1)
