"""The parity guard: silent where the fast path is right, and it names the part that is not. It leaves no trace."""

import copy
import math
import pickle
import random
import time
import weakref
from collections.abc import Callable
from functools import partial
from io import StringIO
from threading import Lock
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import Tensor, nn

from gruppo.data.collate import pad
from gruppo.errors import ParityError
from gruppo.kernels import attention as attention_module
from gruppo.kernels import layers as layers_module
from gruppo.kernels.attention import Segments
from gruppo.plan.budgets import PARITY_WIDE_COPIES
from gruppo.policy import head as head_module
from gruppo.policy import packed as packed_module
from gruppo.policy.fusion import fused_swaps
from gruppo.policy.loading import disable_dropout_in_model
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.modes import sampling_mode
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.support import why_not_packed
from gruppo.trainer.update import parity
from gruppo.trainer.update.parity import Comparison, ParityReport, check_parity, enforce
from gruppo.trainer.update.parity_rows import choose, with_short_prompts
from gruppo.types import TrainBatch
from tests.engine.models import BUILDERS, VOCABULARY, build
from tests.helpers import in_double, tiny_model
from tests.processes import wrapped_alone


def rows(
    prompts: tuple[int, ...] = (6, 11), completions: tuple[tuple[int, ...], ...] = ((5, 3), (9, 7))
) -> TrainBatch:
    """Random rows: prompts of these lengths, each with completions of those."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (length,), generator=generator)

    pairs = [
        (prompt, ids(n))
        for length, tails in zip(prompts, completions, strict=True)
        for prompt in [ids(length)]
        for n in tails
    ]
    heads, tails = [prompt for prompt, _ in pairs], [completion for _, completion in pairs]
    return TrainBatch(
        prompt_ids=pad(heads, 0, "left"),
        prompt_mask=pad([torch.ones_like(head) for head in heads], 0, "left"),
        completion_ids=pad(tails),
        completion_mask=pad([torch.ones_like(tail) for tail in tails]),
    )


def check(
    model: Any, packed: PackedPolicy | None = None, batch: TrainBatch | None = None, **options: Any
) -> ParityReport:
    settings: dict[str, Any] = dict(temperature=0.7, entropy_gradient=True) | options
    return check_parity(model, packed or PackedPolicy(), batch or rows(), **settings)


def errors(report: ParityReport) -> dict[str, Comparison]:
    return {comparison.what: comparison for comparison in report.comparisons}


def with_engine_logps(model: Any, batch: TrainBatch, temperature: float = 0.7) -> TrainBatch:
    """As an engine would have found them."""
    with sampling_mode(model):
        batch.engine_logps = score_tokens(
            model,
            torch.cat([batch.prompt_ids, batch.completion_ids], 1),
            torch.cat([batch.prompt_mask, batch.completion_mask], 1),
            batch.completion_ids.shape[1],
            temperature=temperature,
        ).logps_BT.float()
    return batch


def with_lora(model: Any, **options: Any) -> Any:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(model, adapter)


def prepared(model: Any, dtype: torch.dtype) -> Any:
    """As accelerate prepares it for mixed precision, without its global state."""
    model._original_forward = model.forward
    cast = torch.autocast("cpu", dtype)(model.forward.__func__)
    model.forward = MethodType(convert_outputs_to_fp32(cast), model)
    return model


# ---- nothing to object to


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_completions_of_the_same_token_pass(count: int, dtype: torch.dtype) -> None:
    """Their gradients are equal, so with opposite signs nothing would be left but rounding."""
    one = rows((6,), ((1,),))
    batch = one.rows(torch.zeros(count, dtype=torch.long))
    enforce(check(build("llama").to(dtype), batch=batch, entropy_gradient=False))


@pytest.mark.parametrize("name", BUILDERS)
def test_every_architecture_that_packed_rows_support_passes(name: str) -> None:
    model, packed = build(name), PackedPolicy()
    disable_dropout_in_model(model)  # GPT-2 drops attention weights by default
    assert why_not_packed(model, packed) == []
    report = check(model, packed)
    enforce(report)
    assert report.reference == "float64"
    assert (report.rows, report.tokens, report.dtype) == (4, 24, "float32")
    assert [comparison.what for comparison in report.comparisons] == ["log-probs", "entropies", "gradients"]
    assert all(0 < c.fast < 1e-5 and 0 < c.slow < 1e-5 for c in report.comparisons)


class Run(NamedTuple):
    model: Any
    autocast: torch.dtype | None
    reference: str
    dtype: str


RUNS: dict[str, Callable[[], Run]] = {
    "bfloat16": lambda: Run(build("llama").bfloat16(), None, "float32", "bfloat16"),
    "float16": lambda: Run(build("llama").half(), None, "float32", "float16"),
    "autocast": lambda: Run(build("llama"), torch.bfloat16, "float32", "bfloat16 autocast"),
    "prepared": lambda: Run(prepared(build("llama"), torch.bfloat16), torch.bfloat16, "float32", "bfloat16 autocast"),
    "lora": lambda: Run(with_lora(build("llama")), None, "float64", "float32"),
    "lora bfloat16": lambda: Run(with_lora(build("llama").bfloat16()), None, "float32", "bfloat16"),
    "lora prepared": lambda: Run(
        prepared(with_lora(build("llama")), torch.bfloat16), torch.bfloat16, "float32", "bfloat16 autocast"
    ),
    "experts bfloat16": lambda: Run(build("gpt-oss").bfloat16(), None, "float32", "bfloat16"),
    "soft cap, wrong attention": lambda: Run(_with_sdpa(build("gemma2")), None, "float64", "float32"),
    "float64": lambda: Run(in_double(tiny_model()), None, "padded reference path", "float64"),
}


def _with_sdpa(model: Any) -> Any:
    model.config._attn_implementation_internal = "sdpa"  # drops the cap in some versions of transformers
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_runs_pass_and_are_measured_against_a_wider_type(name: str, training: bool) -> None:
    run = RUNS[name]()
    report = check(run.model.train(training), PackedPolicy(autocast_dtype=run.autocast))
    enforce(report)
    assert (report.reference, report.dtype) == (run.reference, run.dtype)
    # Both paths make errors of the size of the type: the reference is neither of them in disguise.
    least = {"bfloat16": 1e-3, "float16": 1e-4, "float32": 1e-8}.get(report.dtype.split()[0])
    assert all(least is None or (c.slow > least and c.fast > least / 2) for c in report.comparisons)


def test_gradient_checkpointing_takes_part() -> None:
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    runs: list[bool] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, *_: runs.append(module.training))
    enforce(check(model))
    # The copy brings its hooks along: forward and again in the backward pass, 4 rows twice and the pack.
    assert runs == [True] * 2 * (4 + 4 + 1)


def test_adapters_with_checkpointing_pass() -> None:
    model = with_lora(build("llama")).train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    enforce(check(model))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("why", ["reentrant", "noisy"])
def test_what_cannot_be_checked_in_training_mode_is_checked_outside(why: str) -> None:
    model = build("llama").train()
    if why == "reentrant":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    else:
        model.config.attention_dropout = 0.3
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    modes: list[bool] = []
    model.lm_head.register_forward_hook(lambda module, *_: modes.append(module.training))
    enforce(check(model))
    assert modes
    assert not any(modes)
    assert all(module.training for module in model.modules())


def test_tokens_of_an_environment_are_not_compared() -> None:
    batch = rows()
    batch.tool_mask = torch.ones_like(batch.completion_mask)
    batch.tool_mask[:, 1:3] = 0
    report = check(build("llama"), batch=batch)
    enforce(report)
    assert report.tokens == 24 - 8


@pytest.mark.parametrize("seed", range(6))
def test_rounding_that_sends_tokens_to_other_experts_is_no_alarm(seed: int) -> None:
    report = check(build("gpt-oss", seed).bfloat16())
    enforce(report)
    assert errors(report)["gradients"].limit >= 0.5


# ---- what is broken is found and named


def _call_attention(change: Callable[[dict[str, Any], Segments], Segments]) -> Callable[[pytest.MonkeyPatch], None]:
    original = packed_module.packed_attention

    def broken(query: Tensor, key: Tensor, value: Tensor, segments: Segments, **options: Any) -> Tensor:
        return original(query, key, value, change(options, segments), **options)

    return lambda patch: patch.setattr(packed_module, "packed_attention", broken)


def _with_bias(change: Callable[[Tensor, int], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """The mask of a batch of segments (B, 1, M, P + M), P keys of a parent first, is changed."""
    original = attention_module._batch

    def broken(*args: Any) -> Any:
        batch = original(*args)
        bias = batch.bias.clone()
        change(bias[:, 0], batch.shape[2])
        return batch._replace(bias=bias, is_causal=False)

    return lambda patch: patch.setattr(attention_module, "_batch", broken)


def _one_key_more(bias: Tensor, before: int) -> None:
    bias.diagonal(before + 1, 1, 2).zero_()


def _one_key_less(bias: Tensor, before: int) -> None:
    bias.diagonal(before - 1, 1, 2).fill_(-torch.inf)


def _merged(options: dict[str, Any], segments: Segments) -> Segments:
    """Completions of one prompt as one."""
    lengths: list[int] = []
    parents: list[int] = []
    for length, parent in zip(segments.lengths, segments.parents, strict=True):
        if parent >= 0 and parents[-1] >= 0:
            lengths[-1] += length
        else:
            parents.append(len(lengths) - 1 if parent >= 0 else -1)
            lengths.append(length)
    return Segments.of(lengths, parents, segments.bounds.device)


def _times(name: str, factor: float) -> Callable[[dict[str, Any], Segments], Segments]:
    def change(options: dict[str, Any], segments: Segments) -> Segments:
        options[name] *= factor
        return segments

    return change


def _wider(options: dict[str, Any], segments: Segments) -> Segments:
    if options["window"] is not None:
        options["window"] += 1
    return segments


def _late_positions(patch: pytest.MonkeyPatch) -> None:
    """Completions begin one position late."""
    original = Segments.positions

    def broken(segments: Segments) -> Tensor:
        is_child = torch.tensor(segments.parents).repeat_interleave(torch.tensor(segments.lengths)) >= 0
        return original(segments) + is_child

    patch.setattr(Segments, "positions", broken)


def _head(change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    original = head_module.head_scores
    return lambda patch: patch.setattr(head_module, "head_scores", partial(change, original))


def _next_target(original: Any, hidden: Tensor, head: Any, targets: Tensor, **options: Any) -> Any:
    return original(hidden, head, (targets + 1) % len(head.weight), **options)


def _no_temperature(original: Any, *args: Any, **options: Any) -> Any:
    return original(*args, **(options | dict(temperature=1.0)))


def _steep(values: Tensor, factor: float) -> Tensor:
    """The same values with another gradient."""
    return values.detach() + factor * (values - values.detach())


def _steep_logps(original: Any, *args: Any, **options: Any) -> Any:
    logps, entropies = original(*args, **options)
    return _steep(logps, 1.02), entropies


def _entropy_in_bits(original: Any, *args: Any, **options: Any) -> Any:
    logps, entropies = original(*args, **options)
    return logps, entropies / math.log(2)


def _steep_entropy(original: Any, *args: Any, **options: Any) -> Any:
    logps, entropies = original(*args, **options)
    return logps, _steep(entropies, -1.0)


def _norm(change: Callable[[dict[str, Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Wrong with a gradient only: without one a layer is tried out before it is replaced."""
    original = layers_module.rms_norm

    def broken(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
        arguments = options | dict(eps=eps)
        if torch.is_grad_enabled():
            change(arguments)
        return original(x, weight, **arguments)

    return lambda patch: patch.setattr(layers_module, "rms_norm", broken)


def _large_eps(arguments: dict[str, Any]) -> None:
    arguments["eps"] *= 100


def _plus_one(arguments: dict[str, Any]) -> None:
    arguments["plus_one"] = not arguments["plus_one"]


def _every_layer_fused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packed_module, "fused_swaps", partial(fused_swaps, everything=True))


def _wrong_activation(patch: pytest.MonkeyPatch) -> None:
    original = layers_module.gated_linear

    def broken(*args: Any, activation: str, **options: Any) -> Tensor:
        return original(*args, activation="gelu_tanh", **options)

    _every_layer_fused(patch)
    patch.setattr(layers_module, "gated_linear", broken)


def _rotated_back(patch: pytest.MonkeyPatch) -> None:
    original = layers_module.rotary
    _every_layer_fused(patch)

    def broken(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = original(query, key, cos, sin)
        return rotated if not torch.is_grad_enabled() else (rotated[0], original(query, key, cos, -sin)[1])

    patch.setattr(layers_module, "rotary", broken)


class Broken(NamedTuple):
    patch: Callable[[pytest.MonkeyPatch], None]
    culprit: str
    switch: str
    model: str = "llama"


PACKING, HEAD, LAYERS = "packed_update=False", "fused_head=False", "fused_layers=False"

BROKEN = {
    "one key too many": Broken(_with_bias(_one_key_more), "packed rows", PACKING),
    "one key too few": Broken(_with_bias(_one_key_less), "packed rows", PACKING),
    "siblings see each other": Broken(_call_attention(_merged), "prompts that packed rows share", PACKING),
    "scale": Broken(_call_attention(_times("scale", 1.05)), "packed rows", PACKING),
    "window": Broken(_call_attention(_wider), "packed rows", PACKING, "mistral"),
    "soft cap": Broken(_call_attention(_times("softcap", 1.05)), "packed rows", PACKING, "gemma2"),
    "positions": Broken(_late_positions, "packed rows", PACKING),
    "learned positions": Broken(_late_positions, "packed rows", PACKING, "gpt2"),
    "target": Broken(_head(_next_target), "the fused head", HEAD),
    "temperature": Broken(_head(_no_temperature), "the fused head", HEAD),
    "gradient of log-probs": Broken(_head(_steep_logps), "the fused head", HEAD),
    "entropy": Broken(_head(_entropy_in_bits), "the fused head", HEAD),
    "gradient of entropies": Broken(_head(_steep_entropy), "the fused head", HEAD),
    "eps": Broken(_norm(_large_eps), "the fused layers", LAYERS),
    "weight of a norm": Broken(_norm(_plus_one), "the fused layers", LAYERS),
    "weight of Gemma's norm": Broken(_norm(_plus_one), "the fused layers", LAYERS, "gemma3"),
    "activation": Broken(_wrong_activation, "the fused layers", LAYERS),
    "rotation": Broken(_rotated_back, "the fused layers", LAYERS),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_parts_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BROKEN[name]
    model = build(broken.model)
    broken.patch(monkeypatch)
    report = check(model)
    assert (report.culprit, report.switch) == (broken.culprit, broken.switch)
    with pytest.raises(ParityError, match=f"At fault: {broken.culprit}. Set {broken.switch} to continue"):
        enforce(report)
    monkeypatch.undo()
    enforce(check(model))


def test_every_layer_fused_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    _every_layer_fused(monkeypatch)
    report = check(build("llama"))
    enforce(report)
    assert report.culprit is None
    assert report.switch is None


SEEN_IN_BFLOAT16 = (
    "one key too many",
    "siblings see each other",
    "positions",
    "target",
    "temperature",
    "weight of a norm",
)


@pytest.mark.parametrize("name", SEEN_IN_BFLOAT16)
def test_large_mistakes_are_named_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").bfloat16()
    BROKEN[name].patch(monkeypatch)
    report = check(model)
    assert (report.culprit, report.switch) == (BROKEN[name].culprit, BROKEN[name].switch)


def test_two_broken_parts_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN["target"].patch(monkeypatch)
    BROKEN["weight of a norm"].patch(monkeypatch)
    report = check(build("llama"))
    assert report.culprit == "the fused layers and the fused head"
    assert report.switch == "fused_layers=False and fused_head=False"


def test_a_part_that_is_off_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN["target"].patch(monkeypatch)
    enforce(check(build("llama"), PackedPolicy(fused_head=False)))
    report = check(build("llama"), PackedPolicy(fused_layers=False))
    assert report.culprit == "the fused head"


def test_the_gradient_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN["gradient of log-probs"].patch(monkeypatch)
    found = errors(check(build("llama"), entropy_gradient=False))
    assert found["log-probs"].ok
    assert found["entropies"].ok
    assert found["gradients"].fast == pytest.approx(0.02, rel=1e-3)


def test_float64_is_held_to_the_slow_path_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_double(tiny_model())
    assert all(comparison.fast < 1e-12 for comparison in check(model).comparisons)
    steep = partial(_steep, factor=1 + 1e-5)
    _head(lambda original, *args, **options: [steep(values) for values in original(*args, **options)])(monkeypatch)
    report = check(model)
    assert report.switch == "fused_head=False"
    assert errors(report)["gradients"].limit == 1e-6


def test_the_entropy_takes_part_in_the_gradient_only_if_it_does_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN["gradient of entropies"].patch(monkeypatch)
    assert errors(check(build("llama"), entropy_gradient=True))["gradients"].fast > 0.1
    enforce(check(build("llama"), entropy_gradient=False))


def test_the_parameter_with_the_largest_error_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    original = parity._run_packed

    def broken(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        names = [name for name, _ in model.named_parameters()]
        found.sketch[names.index("model.layers.1.mlp.up_proj.weight")] *= 1.5
        return found

    monkeypatch.setattr(parity, "_run_packed", broken)
    with pytest.raises(ParityError, match=r"of their norm, most of it in model\.layers\.1\.mlp\.up_proj\.weight"):
        enforce(check(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_the_sampling_engine(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    batch = with_engine_logps(model, rows())
    report = check(model, batch=batch)
    enforce(report)
    assert report.engine_difference is not None
    assert report.engine_difference < (1e-6 if dtype == torch.float32 else 0.02)
    assert batch.engine_logps is not None
    batch.engine_logps = batch.engine_logps + (0.05 if dtype == torch.float32 else 0.2)
    report = check(model, batch=batch)
    assert report.culprit == "the sampling engine"
    with pytest.raises(ParityError, match=r"sampling log-probs are off .* rollout_backend='transformers'"):
        enforce(report)
    assert [c.what for c in report.comparisons if not c.ok] == ["sampling log-probs"]


def test_the_engine_is_named_beside_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    batch = with_engine_logps(model, rows(), temperature=1.0)
    BROKEN["target"].patch(monkeypatch)
    report = check(model, batch=batch)
    assert report.culprit == "the fused head and the sampling engine"
    assert report.switch == "fused_head=False and rollout_backend='transformers'"


# ---- without a reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_room_for_a_copy_the_slow_path_is_the_reference(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama").to(dtype)
    needed = PARITY_WIDE_COPIES * sum(p.numel() for p in model.parameters()) * (8 if dtype == torch.float32 else 4)
    monkeypatch.setattr(parity, "free_memory", lambda device: needed)
    assert check(model).reference in ("float32", "float64")
    monkeypatch.setattr(parity, "free_memory", lambda device: needed - 1)
    report = check(model)
    enforce(report)
    assert report.reference == "padded reference path"
    assert [comparison.slow for comparison in report.comparisons] == [0, 0, 0]
    BROKEN["siblings see each other"].patch(monkeypatch)
    with pytest.raises(ParityError, match="packed_update=False"):
        enforce(check(model))


def test_a_model_that_cannot_be_copied_is_compared_with_its_slow_path() -> None:
    model = build("llama")
    model.lock = Lock()
    report = check(model)
    enforce(report)
    assert report.reference == "padded reference path"


def test_the_copy_is_gone_before_the_model_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original, copies = build("llama").bfloat16(), copy.deepcopy, []

    def deepcopy(value: Any, *args: Any) -> Any:
        result = original(value, *args)
        if value is model:
            copies.append(result)
        return result

    monkeypatch.setattr(copy, "deepcopy", deepcopy)
    slow = parity._run_slowly
    alive: list[bool] = []

    def watched(run: nn.Module, *args: Any, **options: Any) -> Any:
        alive.append(any(not parameter.is_meta for twin in copies for parameter in twin.parameters()))
        return slow(run, *args, **options)

    monkeypatch.setattr(parity, "_run_slowly", watched)
    enforce(check(model))
    assert alive == [True, False]


def test_nan_of_the_fast_path_is_an_error_and_that_of_the_model_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    with monkeypatch.context() as patch:
        _head(lambda original, *args, **options: [values * torch.nan for values in original(*args, **options)])(patch)
        assert check(model).culprit == "the fused head"
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    enforce(check(model))


# ---- it leaves no trace


def random_states() -> list[Any]:
    return [torch.random.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())]


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """What is set on modules and configs, by identity."""
    owners = [*model.modules(), *(module.config for module in model.modules() if hasattr(module, "config"))]
    return [{name: id(value) for name, value in vars(owner).items()} for owner in owners]


def draw(*_: Any) -> None:
    """A module that draws from every generator there is."""
    torch.rand(1), random.random(), np.random.rand()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("broken", [None, "target", "siblings see each other"])
@pytest.mark.parametrize("kind", ["plain", "checkpointed", "noisy", "autocast", "prepared", "lora"])
def test_no_trace_is_left(kind: str, broken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").train()
    model.model.layers[1].eval()
    if kind == "checkpointed":
        model.gradient_checkpointing_enable()
    elif kind == "prepared":
        model = prepared(model, torch.bfloat16)
    elif kind in ("lora", "noisy"):
        model = with_lora(model, lora_dropout=0.3 if kind == "noisy" else 0.0)
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    model.register_forward_hook(draw)
    if broken:
        BROKEN[broken].patch(monkeypatch)
    draw()
    batch = with_engine_logps(model, rows())
    tensors = {name: value.clone() for name, value in batch.to_dict().items()}
    gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    modes, state = [module.training for module in model.modules()], random_states()
    set_before = attributes(model)
    report = check(
        model, PackedPolicy(autocast_dtype=torch.bfloat16 if kind in ("autocast", "prepared") else None), batch
    )
    assert report.ok == (broken is None)
    assert random_states() == state
    assert [module.training for module in model.modules()] == modes
    assert attributes(model) == set_before
    for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert values is None or torch.equal(parameter.grad, values)
    assert all(torch.equal(value, tensors[name]) for name, value in batch.to_dict().items())


@pytest.mark.parametrize("kind", ["the reference itself", "a copy"])
def test_no_trace_is_left_where_memory_runs_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy it only costs the reference; the model itself is run in the wide type too, if it is in it."""
    model, autocast = build("llama").train(), kind == "the reference itself"
    copies: list[weakref.ref[nn.Module]] = []
    original = copy.deepcopy

    def deepcopy(value: Any, *args: Any) -> Any:
        result = original(value, *args)
        if value is model:
            copies.append(weakref.ref(result))
        return result

    def fail(layer: nn.Module, *_: Any) -> None:
        if autocast or layer.mlp.up_proj.weight.dtype == torch.float64:  # type: ignore[union-attr]
            raise torch.OutOfMemoryError("not enough")

    model.model.layers[1].register_forward_pre_hook(fail)
    monkeypatch.setattr(copy, "deepcopy", deepcopy)
    before, state = attributes(model), random_states()
    packed = PackedPolicy(autocast_dtype=torch.bfloat16 if autocast else None)
    if autocast:
        with pytest.raises(torch.OutOfMemoryError):
            check(model, packed)
    else:
        report = check(model, packed)
        enforce(report)
        assert report.reference == "padded reference path"
    assert (attributes(model), random_states()) == (before, state)
    assert len(copies) == (not autocast)
    assert all(twin() is None for twin in copies), "its memory is free"


def test_a_distributed_wrapper_does_not_notice() -> None:
    alone = build("llama").train()
    with wrapped_alone(build("llama").train()) as wrapper:
        enforce(check(wrapper.module))
        ids = rows().completion_ids
        for model in (wrapper, alone):
            model(input_ids=ids, labels=ids).loss.backward()
        gradients = [parameter.grad for parameter in wrapper.module.parameters()]
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, alone.parameters(), strict=True))


def test_no_two_gradients_are_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    previous: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    original = torch.autograd.grad

    def grad(*args: Any, **options: Any) -> Any:
        assert not any(reference() is not None for reference in previous)
        gradient = original(*args, **options)
        previous[:] = [weakref.ref(part) for part in gradient if part is not None]
        counts.append(len(previous))
        return gradient

    model = build("llama")
    monkeypatch.setattr(torch.autograd, "grad", grad)
    enforce(check(model))
    assert counts == [len(list(model.parameters()))] * (4 + 4 + 1)
    assert not any(reference() is not None for reference in previous)


def test_it_is_quick() -> None:
    model, seconds = build("llama").train(), []
    for _ in range(3):
        start = time.process_time()  # not the clock: the machine may be busy
        enforce(check(model))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1


def test_the_same_rows_give_the_same_report() -> None:
    model = build("llama")
    first = check(model)
    torch.manual_seed(5)
    assert check(model) == first


# ---- rows


def lengths_of(sample: TrainBatch | None) -> list[tuple[int, int]]:
    assert sample is not None
    return list(zip(sample.prompt_mask.sum(1).tolist(), sample.completion_mask.sum(1).tolist(), strict=True))


def test_rows_are_siblings_of_different_lengths() -> None:
    batch = rows((4, 5, 6), ((7,), (3, 9, 6), (2, 2, 8)))
    assert lengths_of(choose(batch, 4)) == [(5, 9), (5, 3), (6, 8), (6, 2)]
    assert lengths_of(choose(batch, 2)) == [(5, 9), (6, 8)]


@pytest.mark.parametrize(
    ("completions", "expected"),
    [
        (((3,), (4,), (5,)), [(4, 3), (5, 4)]),
        (((3, 4, 5, 6, 7, 8), (), ()), [(4, 8), (4, 7), (4, 5), (4, 3)]),
        (((3,), (4, 5, 6), ()), [(5, 6), (5, 5), (5, 4), (4, 3)]),
    ],
)
def test_groups_of_other_sizes(completions: Any, expected: list[tuple[int, int]]) -> None:
    assert lengths_of(choose(rows((4, 5, 6), completions), 4)) == expected


def test_long_completions_are_cut() -> None:
    batch = with_engine_logps(build("llama"), rows((4,), ((300, 5),)))
    sample = choose(batch, 4)
    assert lengths_of(sample) == [(4, 256), (4, 5)]
    assert sample is not None
    assert sample.engine_logps is not None
    assert sample.engine_logps.shape == (2, 256)


def test_long_prompts_are_cut_if_memory_is_short() -> None:
    model = build("llama")
    batch = with_engine_logps(model, rows((300, 300, 4), ((3, 5), (4,), (2,))))
    short = with_short_prompts(batch)
    assert lengths_of(short) == [(256, 3), (256, 5), (256, 4), (4, 2)]
    assert torch.equal(short.prompt_ids[0], batch.prompt_ids[0, -256:])
    report = check(model, batch=short)
    enforce(report)
    assert report.rows == 3
    assert report.engine_difference is None, "the engine's log-probs are those after the whole prompt"


def test_rows_without_loss_tokens_are_left_out() -> None:
    batch = rows((4,), ((3, 9, 6),))
    batch.tool_mask = torch.ones_like(batch.completion_mask)
    batch.tool_mask[1] = 0
    assert lengths_of(choose(batch, 4)) == [(4, 6), (4, 3)]
    batch.tool_mask[:] = 0
    report = check(build("llama"), batch=batch)
    enforce(report)
    assert (report.rows, report.comparisons) == (0, ())


# ---- sketches


@pytest.fixture(scope="module")
def gradient() -> Tensor:
    return torch.randn(37, 51, generator=torch.Generator().manual_seed(0))


def test_a_sketch_has_on_average_the_norm_of_the_gradient(gradient: Tensor) -> None:
    squares = torch.stack([parity._sketch(gradient, seed).square().sum() for seed in range(400)])
    # One has a relative spread of √(2 / 64) or so; of 400 the mean is known to 1 %.
    assert squares.mean().item() == pytest.approx(gradient.square().sum().item(), rel=0.04)
    assert (squares.std() / squares.mean()).item() == pytest.approx((2 / 64) ** 0.5, rel=0.2)


def test_sketches_are_linear_and_the_same_however_they_are_cut(
    gradient: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = gradient.flip(0).square()
    difference = parity._sketch(gradient, 3) - parity._sketch(other, 3)
    assert torch.allclose(difference, parity._sketch(gradient - other, 3), atol=1e-4)
    assert torch.equal(parity._sketch(gradient.T.contiguous().T, 3), parity._sketch(gradient, 3))
    assert torch.equal(parity._sketch(None, 3), torch.zeros(64, dtype=torch.float64))
    monkeypatch.setattr(parity, "_STRETCH", 256)
    sketch = parity._sketch(gradient, 3)
    assert sketch.square().sum().item() == pytest.approx(gradient.square().sum().item(), rel=0.6)


# ---- what it says


def test_the_table_and_the_text_show_every_number() -> None:
    report = ParityReport(
        (Comparison("log-probs", 0.5, 0.1, 0.2), Comparison("gradients", 0.01, 0.02, 0.04, where="lm_head.weight")),
        rows=4,
        tokens=90,
        dtype="bfloat16",
        reference="float32",
        culprit="the fused head",
        switch="fused_head=False",
    )
    console = Console(width=120, record=True, file=StringIO())
    console.print(report.table())
    shown = " ".join(console.export_text().split())
    for text in (
        "4 rows, 90 tokens in bfloat16, errors against float32",
        "log-probs",
        "0.5",
        "0.1",
        "0.2",
        "too large",
    ):
        assert text in shown
    assert shown.count("│ ok │") == 1
    assert "fused_head=False turns off the fused head" in str(report)
    with pytest.raises(ParityError) as caught:
        enforce(report)
    message = str(caught.value)
    assert "log-probs are off by 0.5 nats per token where 0.2 is allowed" in message
    assert "gradients" not in message
