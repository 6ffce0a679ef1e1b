"""Sampling with transformers' own `generate`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from gruppo.data.collate import pad
from gruppo.data.vision import TYPES, model_inputs
from gruppo.engine.settings import merged_config, with_plain_output
from gruppo.errors import ConfigError, RolloutError
from gruppo.policy.inplace import Swap, finite_masks, swapped
from gruppo.policy.modes import has_checkpoints, sampling_mode
from gruppo.policy.sharding import WholeWeights
from gruppo.policy.support import CACHED_LAYERS, unusual_layers
from gruppo.policy.unwrap import forward_arguments, inner_model, is_noisy, makes_positions, position_ids
from gruppo.rollout.base import RolloutBackend, stop_strings, with_limits_of
from gruppo.rollout.padding import PromptPadding
from gruppo.types import Completion, SampleRequest, StopReason


class StopStrings(StoppingCriteria):
    """Ends a row when its completion contains one of the strings, and records at which length.

    `generate` has a criterion of this kind, but it also looks at the end of the prompt and does not report which rows
    it ended: if the padding token is an end token, these rows look as if the model had ended them.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt_width: int):
        if tokenizer is None:
            raise ConfigError(f"stop_strings={list(strings)!r} need a tokenizer; pass one to the backend.")
        self.criterion = StopStringCriteria(tokenizer, list(strings))
        self.prompt_width = prompt_width
        self.lengths: Tensor | None = None  # tokens of each row's completion up to its first string; 0 = none yet

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        written = input_ids[:, self.prompt_width :]
        found: Tensor = self.criterion(written, scores, **kwargs)
        if self.lengths is None:
            self.lengths = torch.zeros(len(written), dtype=torch.long, device=written.device)
        self.lengths = torch.where(found & (self.lengths == 0), written.shape[1], self.lengths)
        return found


class _Dictated(LogitsProcessor):
    """Makes `generate` write these tokens (rows, steps) after `start` others."""

    def __init__(self, targets: Tensor, start: int):
        self.targets, self.start = targets, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        now = self.targets[:, input_ids.shape[1] - self.start, None]
        return torch.full_like(scores, -torch.inf).scatter(1, now, 0.0)


class TransformersBackend(RolloutBackend):
    """Generates with the training module itself, all rows in one batch.

    With `share_prefill`, the prompt of each request is encoded once and its KV cache is copied to its completions;
    without it, or where the cache cannot be shared, every row encodes its prompt.
    """

    policy: Callable[[], Any]
    name = "transformers"

    def __init__(
        self,
        policy: Callable[[], PreTrainedModel],
        config: GenerationConfig,
        *,
        stop_ids: Sequence[int],
        tokenizer: Any = None,
        pad_to_multiple_of: int | None = None,
        share_prefill: bool = True,
        whole: WholeWeights | None = None,
        lockstep: bool = False,
    ):
        self.whole = whole
        self.policy = policy  # called each time: wrapping for training replaces the module
        self.config = config
        self.stop_ids = set(stop_ids)
        self.tokenizer = tokenizer  # only stop strings need it
        self.pad_to_multiple_of = pad_to_multiple_of
        self.lockstep = lockstep  # the weights are sharded: processes run their forward passes in lockstep
        # Not in lockstep: only a process with several completions of a prompt would make the extra pass.
        self.share_prefill = share_prefill and not lockstep
        self.padding = PromptPadding(self.logps_of)

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """`count` completions for each request, flat and in order."""
        with self.ready():
            if requests and not self.lockstep and all(request.vision is None for request in requests):
                self.padding.check(self.policy, [request.prompt_ids for request in requests])
            alone = self.padding.alone and not self.lockstep  # in lockstep, processes sample equally often
            together = [[request] for request in requests] if alone else [requests]
            return [completion for part in together for completion in self._sample(part)]

    def _sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        if not requests:
            return []
        policy = self.policy()
        device = policy.get_input_embeddings().weight.device
        prompts = [torch.tensor(list(request.prompt_ids), dtype=torch.long) for request in requests]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        ids = pad(prompts, self.config.pad_token_id, "left", self.pad_to_multiple_of).to(device)
        mask = pad(masks, 0, "left", self.pad_to_multiple_of).to(device)
        owner = torch.arange(len(requests)).repeat_interleave(torch.tensor([request.count for request in requests]))
        owner = owner.to(device)  # the request that each row belongs to
        strings, settings = self._settings(policy, ids.shape[1], with_limits_of(requests, self.config))
        with sampling_mode(policy), finite_masks():
            cache = self._prefill(policy, requests, ids, mask, owner)
            if cache is None:  # otherwise the prefill has processed the images
                settings |= self._seen(policy, requests, ids, owner)
            with _own_stop_strings_off(policy):
                sequences = policy.generate(
                    input_ids=ids[owner],
                    attention_mask=mask[owner],
                    past_key_values=cache,
                    **settings,
                    **({"synced_gpus": True} if self.lockstep else {}),
                )
        if len(sequences) != len(owner):
            raise RolloutError(f"generate returned {len(sequences)} sequences for {len(owner)} prompts.")
        cuts = [0] * len(owner) if strings is None or strings.lengths is None else strings.lengths.tolist()
        rows = sequences[:, ids.shape[1] :].tolist()
        limits = [request.max_new_tokens for request in requests for _ in range(request.count)]
        return [self._completion(row, cut, limit) for row, cut, limit in zip(rows, cuts, limits, strict=True)]

    def logps_of(self, rows: Sequence[Sequence[int]], last: int) -> Tensor:
        """Log-probs (rows, last) of the last tokens of these rows at temperature 1, computed as when sampling them."""
        together = [[row] for row in rows] if self.padding.alone else [rows]
        return torch.cat([self._logps_of(part, last) for part in together])

    def _logps_of(self, rows: Sequence[Sequence[int]], last: int) -> Tensor:
        policy = self.policy()
        device = policy.get_input_embeddings().weight.device
        tensors = [torch.tensor(list(row), device=device) for row in rows]
        targets = torch.stack([row[-last:] for row in tensors])
        ids = pad([row[:-last] for row in tensors], self.config.pad_token_id, "left", self.pad_to_multiple_of)
        mask = pad([torch.ones_like(row[:-last]) for row in tensors], 0, "left", self.pad_to_multiple_of)
        config, in_effect = GenerationConfig(), _in_effect(self.config, policy)
        config.update(max_new_tokens=last, do_sample=False, pad_token_id=self.config.pad_token_id)
        config.update(use_cache=in_effect.use_cache, cache_implementation=in_effect.cache_implementation)
        config.update(output_logits=True, return_dict_in_generate=True)
        with sampling_mode(policy), _own_settings_off(policy):
            found = policy.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([_Dictated(targets, ids.shape[1])]),
            )
        logps = torch.stack(found.logits, 1).float().log_softmax(-1)
        return logps.gather(-1, targets[..., None])[..., 0]

    def state_dict(self) -> dict[str, Any]:
        return {"padding": self.padding.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "padding" in state:  # another backend may have written the checkpoint
            self.padding.load_state_dict(state["padding"])

    def work(self, prompts: Sequence[int], completions: Sequence[int]) -> dict[str, Any]:
        """Prompts are padded to the longest one, and all rows run until the last one ends."""
        padding = sum(max(lengths, default=0) * len(lengths) - sum(lengths) for lengths in (prompts, completions))
        return {"padding_tokens": padding}

    def _seen(
        self, policy: Any, requests: Sequence[SampleRequest], ids: Tensor, owner: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The model's image inputs for each request or, given `owner`, for each row."""
        if all(request.vision is None for request in requests):
            return {}
        rows = [requests[i] for i in (range(len(requests)) if owner is None else owner.tolist())]
        starts = [ids.shape[1] - len(row.prompt_ids) for row in rows]
        dtype = inner_model(policy).dtype
        return model_inputs([row.vision for row in rows], starts, ids.shape[1], device=ids.device, dtype=dtype)

    def _settings(self, policy: Any, prompt_width: int, config: Any) -> tuple[StopStrings | None, dict[str, Any]]:
        """The criterion that watches for stop strings, if there are any, and the sampling arguments of generate."""
        config, in_effect = with_plain_output(config), _in_effect(config, policy)
        if not (wanted := stop_strings(in_effect)):
            return None, {"generation_config": config}
        if (in_effect.num_beams or 1) > 1:
            raise ConfigError(
                f"stop_strings={wanted!r} with num_beams={in_effect.num_beams}: beams change places, so it is unknown "
                "which one a string ended. Remove one of the two from model.generation_config or generation_kwargs."
            )
        watch = StopStrings(self.tokenizer, wanted, prompt_width)
        config.stop_strings = None
        return watch, {"generation_config": config, "stopping_criteria": StoppingCriteriaList([watch])}

    def _prefill(
        self, policy: Any, requests: Sequence[SampleRequest], ids: Tensor, mask: Tensor, owner: Tensor
    ) -> Cache | None:
        """The KV cache of all prompts without their last tokens, one copy per row; None: generate encodes them."""
        if len(owner) == len(ids) or ids.shape[1] < 2 or not self._can_share(policy):
            return None
        seen = self._seen(policy, requests, ids)
        seen = {name: value[:, :-1] if name in TYPES else value for name, value in seen.items()}
        cache = read_prompts(policy, ids[:, :-1], mask[:, :-1], seen)
        cache.batch_select_indices(owner)
        share_positions(policy, owner, has_grid=makes_positions(seen))
        return cache

    def _can_share(self, policy: Any) -> bool:
        config = _in_effect(self.config, policy)
        plain = config.cache_implementation is None and config.num_beams in (None, 1) and config.use_cache
        return bool(self.share_prefill and plain and can_continue_from_cache(policy))

    def _completion(self, ids: list[int], cut: int = 0, limit: int | None = None) -> Completion:
        """The ids up to the first end-of-sequence token or, at `cut`, a stop string; the rest is padding.

        Tokens beyond `limit` were sampled only because other rows of the batch may be longer.
        """
        if limit is not None and limit <= 0:
            return Completion([], StopReason.NO_ROOM)
        ids = ids[:limit]
        cut = cut if cut <= len(ids) else 0
        for position, token in enumerate(ids[: cut or None]):
            if token in self.stop_ids:
                return Completion(ids[: position + 1], StopReason.EOS)
        if cut:
            return Completion(ids[:cut], StopReason.STOP_STRING)
        # If the model itself wrote a padding token last, that counts as an end, too.
        ended = bool(ids) and ids[-1] == self.config.pad_token_id
        return Completion(ids, StopReason.EOS if ended else StopReason.LENGTH)


def _in_effect(config: Any, policy: Any) -> Any:
    return merged_config(config, getattr(inner_model(policy), "generation_config", None))


@contextmanager
def _own_stop_strings_off(policy: Any) -> Iterator[None]:
    """Inside this context `generate` does not read the model's own stop strings, for which `StopStrings` watches."""
    config = getattr(inner_model(policy), "generation_config", None)
    with swapped([] if config is None else [Swap(config, "stop_strings", None)]):
        yield


@contextmanager
def _own_settings_off(policy: Any) -> Iterator[None]:
    """Inside this context `generate` reads none of the model's own settings: beams, limits, tokens that end a row."""
    own = getattr(inner_model(policy), "generation_config", None)
    plain = {name: value for name, value in vars(GenerationConfig()).items() if not name.startswith("_")}
    given = {} if own is None else vars(own)
    with swapped([Swap(own, name, plain.get(name)) for name in given if not name.startswith("_")]):
        yield


def read_prompts(model: Any, ids: Tensor, mask: Tensor, seen: dict[str, Tensor]) -> DynamicCache:
    """The KV cache after one forward pass over left-padded prompts and their image inputs `seen`."""
    cache = DynamicCache(config=inner_model(model).config)
    positions = {} if makes_positions(seen) else {"position_ids": position_ids(mask)}
    model(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **positions,
        **seen,
    )
    return cache


def share_positions(model: Any, owner: Tensor, *, has_grid: bool) -> None:
    """Expand the position offsets that a model (Qwen-VL) stores for rows with images to the rows of `owner`.

    Without images (`has_grid` is False) the offsets are zero; those stored are from an earlier pass.
    """
    for module in inner_model(model).modules():
        if hasattr(module, "rope_deltas"):
            none = torch.zeros(len(owner), 1, dtype=torch.long, device=owner.device)
            module.rope_deltas = module.rope_deltas[owner] if has_grid else none


def can_continue_from_cache(model: Any) -> bool:
    """Whether rows can start from a precomputed KV cache: standard attention, nothing recomputed."""
    inner = inner_model(model)
    known = {"past_key_values", "position_ids", "logits_to_keep"} <= forward_arguments(model)
    virtual = any(
        getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()
    )
    if not known or virtual or unusual_layers(inner, CACHED_LAYERS):
        return False
    # With gradient checkpointing, transformers drops the cache in training mode.
    return not (model.training and (has_checkpoints(inner) or is_noisy(model, inner)))
