"""Packed rows are scored and differentiated as the slow twin does it, one row at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from triton import OutOfResources

from gruppo.errors import PackingError
from gruppo.kernels import layers
from gruppo.policy import packed, support
from gruppo.policy.adapters import use_adapter
from gruppo.policy.fusion import fused_swaps
from gruppo.policy.head import ModelHead
from gruppo.policy.loading import disable_dropout_in_model
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import Packer
from gruppo.policy.support import packed_trial, why_not_packed
from tests.engine import test_support as other
from tests.engine.models import BUILDERS
from tests.policy.families import family
from tests.policy.twins import (
    ADAPTERS,
    HEADS,
    RAGGED,
    Found,
    Rows,
    altered,
    assert_same,
    distance,
    in_double,
    made,
    rows_of,
    run_packed,
    run_slowly,
)

MODELS = ["llama", "qwen2", "qwen2-sliding", "qwen3", "mistral", "gemma2", "gemma3"]
FURTHER = sorted(set(BUILDERS) - set(MODELS))
EVERYTHING = [*MODELS, *FURTHER, *HEADS, *ADAPTERS]
ALL_ROWS = range(len(RAGGED.batch))


@pytest.fixture
def exactly() -> Iterator[None]:
    with in_double():
        yield


@cache
def slow_twin(kind: str, **options: Any) -> Found:
    """What is to be found, in float64: the same for all ways to pack."""
    with in_double():
        return run_slowly(trainable(kind), **options)


def trainable(kind: str, *, reentrant: bool | None = None) -> Any:
    """The model in float64 and in training mode, without dropout; with checkpointing of a kind unless that is None."""
    model = made(kind).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant or kind in ADAPTERS:
            model.enable_input_require_grads()
    return model


def tiered(kinds: list[str], fast: list[str]) -> list[Any]:
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.medium) for kind in kinds]


# ---- models, in float64


@pytest.mark.parametrize("kind", tiered([*MODELS, *FURTHER], MODELS))
def test_every_architecture(kind: str, exactly: None) -> None:
    assert_same(run_packed(trainable(kind), PackedPolicy()), slow_twin(kind), 1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", HEADS)
def test_every_kind_of_head(kind: str, fused: bool, exactly: None) -> None:
    model = trainable(kind)
    head = ModelHead.of(model)
    assert head.linear is not None
    assert (head.linear.bias is not None) == (kind == "bias")
    assert head.scale == {"scaled": 0.3, "divided": 1 / 3}.get(kind, 1.0)
    assert head.softcap == (2.0 if kind == "capped" else None)
    is_tied = head.linear.weight is model.get_input_embeddings().weight
    assert is_tied == (kind in ("tied", "capped", "scaled"))
    assert_same(run_packed(model, PackedPolicy(fused_head=fused)), slow_twin(kind), 1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_place_of_an_adapter(kind: str, fused: bool, exactly: None) -> None:
    model, slow = trainable(kind), slow_twin(kind)
    assert (ModelHead.of(model).linear is None) == (kind == "on the head")
    assert all("lora_" in name or "modules_to_save" in name for name in slow.gradients)
    assert any("modules_to_save" in name for name in slow.gradients) == (kind == "own head")
    assert_same(run_packed(model, PackedPolicy(fused_head=fused)), slow, 1e-9)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_without_its_adapter_a_model_is_its_base(kind: str, exactly: None) -> None:
    """As the reference of a policy with adapters is run."""
    model, policy = trainable(kind), PackedPolicy()
    (pack,) = Packer(RAGGED.batch).packs(ALL_ROWS, 10**6)
    with torch.no_grad(), policy.active(model), use_adapter(model, None):
        found = pack.padded(policy.score(model, pack, temperature=0.7).logps)[RAGGED.batch.loss_mask_BT.bool()]
    assert (found - slow_twin("llama").logps).abs().max() < 1e-9
    assert (found - slow_twin(kind).logps).abs().max() > 1e-2


@pytest.mark.medium
def test_keys_of_another_size_than_values(exactly: None) -> None:
    """Multi-head latent attention, which the sampling engine cannot run."""
    model = other.latents().double().eval()
    model.set_experts_implementation("eager")
    assert why_not_packed(model, PackedPolicy()) == []
    assert_same(run_packed(model, PackedPolicy()), run_slowly(model), 1e-9)


# ---- ways to pack, in float64


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 20, 30, 10**6])
@pytest.mark.parametrize("kind", ["qwen2-sliding", "gemma2"])
def test_however_rows_are_packed(kind: str, budget: int, share: bool, exactly: None) -> None:
    sizes = [len(pack.rows) for pack in Packer(RAGGED.batch, share=share).packs(ALL_ROWS, budget)]
    assert sum(sizes) == len(ALL_ROWS)
    assert {1: max(sizes) == 1, 10**6: len(sizes) == 1}.get(budget, 1 < len(sizes) < len(ALL_ROWS))
    assert_same(run_packed(trainable(kind), PackedPolicy(), budget=budget, share=share), slow_twin(kind), 1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("kind", ["llama", "capped", "on the head"])
def test_the_temperature_is_that_of_the_twin(kind: str, temperature: float, fused: bool, exactly: None) -> None:
    fast = run_packed(trainable(kind), PackedPolicy(fused_head=fused), temperature=temperature)
    assert_same(fast, slow_twin(kind, temperature=temperature), 1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["llama", "own head", "on the head"])
def test_an_entropy_without_a_gradient_has_none(kind: str, fused: bool, exactly: None) -> None:
    fast = run_packed(trainable(kind), PackedPolicy(fused_head=fused), entropy_gradient=False)
    assert_same(fast, slow_twin(kind, entropy_gradient=False), 1e-9)
    assert distance(fast, slow_twin(kind)) > 1e-2


@pytest.mark.parametrize("fused", [True, False])
def test_without_entropies_log_probs_are_the_same(fused: bool, exactly: None) -> None:
    model, policy = trainable("llama"), PackedPolicy(fused_head=fused)
    (pack,) = Packer(RAGGED.batch).packs(ALL_ROWS, 10**6)
    with policy.active(model):
        logps, entropies = policy.score(model, pack, temperature=0.7)
    assert entropies is None
    assert logps.requires_grad
    assert (pack.padded(logps)[RAGGED.batch.loss_mask_BT.bool()] - slow_twin("llama").logps).abs().max() < 1e-9


@pytest.mark.parametrize("groups", [[(1, (1,))], [(3, (1, 1, 1))], [(40, (1, 30))], [(1, (50,)), (2, (1,))]], ids=str)
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_extreme_shapes(kind: str, groups: list[tuple[int, tuple[int, ...]]], exactly: None) -> None:
    rows, model = rows_of(groups), trainable(kind)
    slow = run_slowly(model, rows)
    for budget in (1, 10**6):
        assert_same(run_packed(model, PackedPolicy(), rows, budget=budget), slow, 1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_tokens_of_an_environment_are_read_but_not_scored(fused: bool, exactly: None) -> None:
    tool_mask = (torch.arange(RAGGED.batch.completion_ids.numel()) % 3 != 1).long().view(RAGGED.weights.shape[1:])
    mixed = RAGGED.batch.rows(slice(None))
    mixed.tool_mask = tool_mask
    model = trainable("llama")
    slow = run_slowly(model, Rows(RAGGED.pairs, RAGGED.batch, RAGGED.weights * tool_mask))
    fast = run_packed(model, PackedPolicy(fused_head=fused), Rows(RAGGED.pairs, mixed, RAGGED.weights))
    kept = tool_mask[RAGGED.batch.completion_mask.bool()].bool()
    assert 0 < kept.sum() < len(kept)
    assert_same(fast, Found(slow.logps[kept], slow.entropies[kept], slow.gradients), 1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_rows_of_which_nothing_is_scored_have_a_gradient_of_zero(fused: bool, exactly: None) -> None:
    blank = RAGGED.batch.rows(slice(None))
    blank.tool_mask = torch.zeros_like(blank.completion_mask)
    model = trainable("llama")
    found = run_packed(model, PackedPolicy(fused_head=fused), Rows(RAGGED.pairs, blank, RAGGED.weights))
    assert len(found.logps) == 0
    assert found.gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(not gradient.any() for gradient in found.gradients.values())


# ---- checkpointing, and what is replaced while packed rows run


@pytest.fixture
def attentions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every call of packed attention: whether a gradient was wanted."""
    seen: list[bool] = []
    attend = packed.packed_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(packed, "packed_attention", watched)
    return seen


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "own head", "on the head"])
def test_checkpointing_runs_the_same_layers_again(
    kind: str, reentrant: bool | None, exactly: None, attentions: list[bool]
) -> None:
    model = trainable(kind, reentrant=reentrant)
    attentions.clear()
    assert_same(run_packed(model, PackedPolicy()), slow_twin(kind), 1e-9)
    layers_run = model.config.num_hidden_layers
    assert len(attentions) == layers_run * (1 if reentrant is None else 2)
    assert sum(attentions) == layers_run * (2 if reentrant is False else 1)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_backward_pass_outside_is_an_error(reentrant: bool | None, exactly: None) -> None:
    model, policy = trainable("llama", reentrant=reentrant), PackedPolicy()
    (pack,) = Packer(RAGGED.batch).packs(ALL_ROWS, 10**6)
    with policy.active(model):
        first, second = (policy.score(model, pack).logps.sum() for _ in range(2))
    with pytest.raises(PackingError, match=r"outside of `PackedPolicy.active`.*packed_update=False"):
        first.backward()
    with policy.active(model):
        second.backward()
    assert model.lm_head.weight.grad.any()


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "olmo2", "every layer"])
def test_with_every_layer_fused(
    kind: str, reentrant: bool | None, exactly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where MLPs and rotary embeddings are replaced beside norms."""
    calls = dict.fromkeys(("rms_norm", "rotary", "gated"), 0)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += torch.is_grad_enabled()
            return function(*args, **kwargs)

        return counted

    for name in calls:
        monkeypatch.setattr(layers, name, counting(name, getattr(layers, name)))
    monkeypatch.setattr(packed, "fused_swaps", partial(fused_swaps, everything=True))
    model = trainable(kind, reentrant=reentrant)
    fast = run_packed(model, PackedPolicy())
    assert_same(fast, slow_twin(kind), 1e-9)
    assert calls["rotary"] == calls["gated"] == 3 * (1 if reentrant is None else 2)
    assert calls["rms_norm"] > 2 * calls["rotary"]


def traces(model: nn.Module) -> list[Any]:
    """What an instance may carry that its class does not know of."""
    configs = [vars(module.config).copy() for module in model.modules() if hasattr(module, "config")]
    return [configs, [sorted(vars(module)) for module in model.modules()]]


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("kind", ["gemma2", "own head"])
def test_everything_comes_back(kind: str, interrupted: bool, exactly: None) -> None:
    model, policy = trainable(kind), PackedPolicy()
    before, plain = traces(model), run_slowly(model)
    (pack,) = Packer(RAGGED.batch).packs(ALL_ROWS, 10**6)
    try:
        with policy.active(model):
            inside = traces(model)
            policy.score(model, pack, temperature=0.0 if interrupted else 1.0)
    except ValueError:
        assert interrupted
    assert inside != before
    assert traces(model) == before
    assert_same(run_slowly(model), plain, 0.0)


def test_weights_that_are_exchanged_are_looked_at_anew(exactly: None) -> None:
    model, policy = trainable("llama"), PackedPolicy()
    run_packed(model, policy)
    model.model.norm = nn.RMSNorm(32, eps=1e-6).double()
    assert_same(run_packed(model, policy), run_slowly(model), 1e-9)


class Twice(tf.LlamaForCausalLM):
    """Runs its head a second time."""

    def forward(self, **kwargs: Any) -> Any:
        super().forward(**kwargs)
        return super().forward(**kwargs)


def test_a_head_that_is_called_twice_is_an_error() -> None:
    model = other.disguised(Twice)
    (pack,) = Packer(RAGGED.batch).packs(ALL_ROWS, 10**6)
    policy = PackedPolicy()
    with pytest.raises(PackingError, match="Twice calls its head 2 times, not once"), policy.active(model):
        policy.score(model, pack)


# ---- which models


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", EVERYTHING)
def test_nothing_is_held_against_these(kind: str, training: bool) -> None:
    model = made(kind).train(training)
    if kind == "gpt2":
        disable_dropout_in_model(model)
    assert why_not_packed(model, PackedPolicy()) == []


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [lambda: altered("llama", attention_dropout=0.1), lambda: made("gpt2")])
def test_attention_that_drops_weights_when_it_is_trained(make: Callable[[], Any], training: bool) -> None:
    """Whatever mode it is in when it is asked about: loaded models begin in evaluation mode."""
    model = make().train(training)
    (reason,) = why_not_packed(model, PackedPolicy())
    assert "Attention applies dropout to attention weights (0.1), which packed rows do not support" in reason
    assert all(module.training == training for module in model.modules())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (other.state_space, "it keeps a recurrent state"),
        (other.recurrence, "it keeps a recurrent state"),
        (other.convolutions, "it has layers of the kind conv"),
        (other.chunks, "it has layers of the kind chunked_attention"),
        (other.encoder_decoder, "it is an encoder-decoder model"),
        (other.bidirectional, "its attention is not causal"),
        (other.dynamic, "its rotary embedding (dynamic) depends on the longest sequence of a batch"),
        (other.virtual_prompt, "its adapter learns virtual prompt tokens"),
        (other.own_attention, "BloomForCausalLM does not support custom attention functions"),
    ],
)
def test_what_is_missing_for_others_is_named(make: Callable[[], Any], reason: str) -> None:
    assert reason in why_not_packed(make(), PackedPolicy())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: other.disguised(other.OwnScores, "attention"), "in a trial its log-probs differ"),
        (lambda: other.disguised(other.OwnMask, "attention"), "OwnMask makes its own attention mask"),
        (lambda: other.disguised(other.Reserved, "layer"), "LlamaAttention does not pass forward arguments on"),
        (lambda: other.disguised(other.OwnPositions), "in a trial its log-probs differ"),
        (lambda: other.disguised(Twice), "Twice calls its head 2 times"),
        (other.broken, "in a trial its log-probs differ"),
    ],
)
def test_a_trial_finds_what_nobody_thought_of(make: Callable[[], Any], reason: str) -> None:
    failure = packed_trial(make(), PackedPolicy())
    assert failure is not None
    assert reason in failure


@pytest.mark.parametrize("make", [other.own_attention, other.convolutions, other.recurrence, other.state_space])
def test_a_trial_gives_a_reason_whatever_the_model_does(make: Callable[[], Any]) -> None:
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # fresh weights are so small that all models say the same
    failure = packed_trial(model, PackedPolicy())
    assert failure is not None
    assert failure.startswith(("a trial of it failed: ", "in a trial its log"))


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_a_leak_between_rows_that_rounding_would_hide_is_found(name: str) -> None:
    """The state of convolutions runs on from one row of a pack into the next."""
    model: Any = family(name).bfloat16()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "conv" in key:
                parameter.mul_(0.5)
    failure = packed_trial(model, PackedPolicy())
    assert failure is not None
    assert "its log-probs in float32 differ" in failure
    assert model.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["gemma4", "gemma3n", "llama"])
def test_rounding_alone_is_no_leak(name: str) -> None:
    model: Any = (trainable("llama") if name == "llama" else family(name)).bfloat16()
    assert packed_trial(model, PackedPolicy()) is None


def test_autocast_hides_no_leak_either() -> None:
    policy = PackedPolicy(autocast_dtype=torch.bfloat16)
    assert packed_trial(family("gemma4"), policy) is None
    model: Any = family("lfm2")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "conv" in key:
                parameter.mul_(0.5)
    assert "in float32" in (packed_trial(model, policy) or "")


def test_a_trial_that_cannot_run_in_float32_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def refuse(model: Any) -> Iterator[None]:
        raise TypeError("half precision only")
        yield

    monkeypatch.setattr(support, "in_float32", refuse)
    assert packed_trial(trainable("llama").bfloat16(), PackedPolicy()) is None
    assert "does not run in float32: TypeError: half precision only" in caplog.text


def test_a_kernel_that_does_not_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise OutOfResources(172_032, 101_376, "shared memory")

    monkeypatch.setattr(PackedPolicy, "score", refuse)
    (reason,) = why_not_packed(trainable("llama"), PackedPolicy())
    assert reason.startswith("a trial of it failed: OutOfResources: ")
    assert "172032" in reason


# ---- every combination, in float64


@pytest.mark.sampled(10)
@pytest.mark.medium
@pytest.mark.parametrize("kind", EVERYTHING)
def test_every_combination(kind: str, exactly: None) -> None:
    for reentrant in (None, False, True):
        model = trainable(kind, reentrant=reentrant)
        for fused_head in (True, False):
            for share, budget in ((True, 10**6), (True, 15), (False, 10**6), (False, 1)):
                fast = run_packed(model, PackedPolicy(fused_head=fused_head), share=share, budget=budget)
                assert_same(fast, slow_twin(kind), 1e-9)
        assert_same(run_packed(model, PackedPolicy(fused_layers=False)), slow_twin(kind), 1e-9)


# ---- in the types that are trained in


def close(fast: Found, slow: Found, bound: float) -> None:
    """Mean error of values, and the gradients as one vector."""
    assert distance(fast, slow) < bound
    assert (fast.logps - slow.logps).abs().mean() < bound
    assert (fast.entropies - slow.entropies).abs().mean() < bound


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", tiered(EVERYTHING, [*MODELS, *HEADS, *ADAPTERS]))
def test_in_float32(kind: str) -> None:
    model = trainable(kind).float()
    slow = run_slowly(model)
    for options in (dict(), dict(share=False), dict(budget=20)):
        close(run_packed(model, PackedPolicy(), **options), slow, 1e-5)
    close(run_packed(model, PackedPolicy(fused_head=False)), slow, 1e-5)


def no_further(fast: Found, slow: Found, exact: Found) -> None:
    """From the exact result than twice the slow twin's distance."""
    errors = [
        (
            distance(found, exact),
            (found.logps - exact.logps).abs().mean(),
            (found.entropies - exact.entropies).abs().mean(),
        )
        for found in (fast, slow)
    ]
    for ours, theirs in zip(*errors, strict=True):
        assert 0 < ours < 2 * theirs
    assert errors[1][0] < 0.2


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "on the head"])
def test_under_autocast(kind: str, fused: bool) -> None:
    """Float32 weights, products in bfloat16."""
    model = trainable(kind).float()
    exact = run_slowly(model)
    with torch.autocast("cpu", torch.bfloat16):
        slow = run_slowly(model)
        fast = run_packed(model, PackedPolicy(fused_head=fused, autocast_dtype=torch.bfloat16))
    no_further(fast, slow, exact)


# ---- on a GPU


ON_GPU = ["llama", "qwen2", "qwen2-sliding", "qwen3", "mistral", "gemma2", "gemma3"]
MANY = [(20, (30, 1, 70, 33, 64)), (3, (90, 2)), (64, (17,)), (5, (40, 41, 1))]


@pytest.fixture
def without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_gpu(name: str, dtype: torch.dtype, checkpointing: bool, **changes: Any) -> Any:
    model = altered(name, **(dict(head_dim=16, max_position_embeddings=512) | changes)).train().to("cuda", dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ON_GPU)
def test_on_cuda_in_float32(name: str, checkpointing: bool, without_tf32: None) -> None:
    model, rows = on_gpu(name, torch.float32, checkpointing), rows_of(MANY, "cuda")
    slow = run_slowly(model, rows)
    for fused in (True, False):
        close(run_packed(model, PackedPolicy(fused_head=fused, fused_layers=fused), rows), slow, 1e-5)
    close(run_packed(model, PackedPolicy(), rows, budget=100), slow, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ON_GPU)
def test_on_cuda_in_bfloat16(name: str, checkpointing: bool, without_tf32: None) -> None:
    rows = rows_of(MANY, "cuda")
    model = on_gpu(name, torch.bfloat16, checkpointing)
    slow, fast = run_slowly(model, rows), run_packed(model, PackedPolicy(), rows)
    no_further(fast, slow, run_slowly(model.float(), rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_with_heads_of_128(dtype: torch.dtype, without_tf32: None) -> None:
    """A group of eight completions of about 150 tokens, with the heads of a model of 1.5 billion weights."""
    heads = dict(head_dim=128, num_attention_heads=12, num_key_value_heads=2, hidden_size=256, initializer_range=0.05)
    rows = rows_of([(70, (150, 143, 161, 128, 155, 97, 149, 150))], "cuda")
    model = on_gpu("qwen2", dtype, False, **heads)
    slow, fast = run_slowly(model, rows), run_packed(model, PackedPolicy(), rows)
    if dtype is torch.float32:
        close(fast, slow, 1e-5)
    else:
        no_further(fast, slow, run_slowly(model.float(), rows))
