"""Fused layers in training: the gradients of the model's own layers, and nothing else changes."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from gruppo.kernels import layers
from gruppo.policy.fusion import fused_swaps
from gruppo.policy.inplace import Swap, swapped
from tests import interpreter
from tests.engine.models import build

interpreter.make_ready()
# Norms, gated MLPs and rotary embeddings that are replaced, in three layers. Gemma norms more, OLMo-2 and Qwen3 heads.
EXPECTED = {
    "llama": (7, 3, 1),
    "qwen2": (7, 3, 1),
    "qwen3": (13, 3, 1),
    "mistral": (7, 3, 1),
    "gemma2": (13, 3, 1),
    "gemma3": (19, 3, 1),
    "olmo2": (13, 3, 1),
}
IDS = torch.tensor([[5, 9, 11, 30, 2, 40, 41, 7, 63]])


def everything(model: nn.Module, dtypes: set[torch.dtype] | None = None) -> list[Swap]:
    return fused_swaps(model, dtypes or {torch.float32}, everything=True)


def counts(swaps: list[Swap]) -> tuple[int, int, int]:
    norms = [swap for swap in swaps if type(swap.owner).__name__.endswith("RMSNorm")]
    mlps = [swap for swap in swaps if type(swap.owner).__name__.endswith("MLP")]
    rotary = [swap for swap in swaps if swap.name == "apply_rotary_pos_emb"]
    assert len(norms) + len(mlps) + len(rotary) == len(swaps)
    return len(norms), len(mlps), len(rotary)


def step(model: Any, ids: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of one forward pass and the gradients of a loss in which every logit counts."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    logits = model(input_ids=ids, use_cache=False).logits
    (logits.log_softmax(-1) * torch.linspace(-1, 2, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], bound: float) -> None:
    assert (got[0] - expected[0]).norm() <= bound * expected[0].norm()
    assert got[1].keys() == expected[1].keys() != set()
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).norm() <= bound * gradient.norm(), name
        assert gradient.norm() > 0, name


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the fused layers, in the order in which they are called while a gradient is wanted."""
    seen: list[str] = []

    def watch(name: str) -> None:
        function = getattr(layers, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(layers, name, watched)

    for name in ("rms_norm", "rotary", "gated", "gated_linear"):
        watch(name)
    return seen


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", EXPECTED)
def test_gradients_are_those_of_the_model(name: str, checkpointing: bool, calls: list[str]) -> None:
    model = build(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = step(model)
    assert calls == []
    swaps = everything(model)
    assert counts(swaps) == EXPECTED[name]
    with swapped(swaps):
        got = step(model)  # the backward pass inside: checkpointing runs the layers again
    same(got, expected, 1e-5)
    norms, mlps, _ = EXPECTED[name]
    again = 1 + checkpointing
    assert calls.count("gated_linear") == mlps * again
    assert calls.count("rotary") == 3 * again
    assert calls.count("rms_norm") == (norms - 1) * again + 1, "the last norm is outside of the layers"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, and run below")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_the_kernels_in_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens on CUDA, in Triton's interpreter."""
    model = build(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, ran = step(model), []
    monkeypatch.setattr(layers, "_has_kernels", lambda _: ran.append(1) or True)
    with swapped(everything(model)):
        ran.clear()
        same(step(model), expected, 1e-5)
    assert len(ran) >= 2 * (EXPECTED[name][0] + 3 + 3) - 1


def test_more_than_one_row_is_left_to_the_model(calls: list[str]) -> None:
    """Rotary embedding of packed tokens is ours; rows side by side keep the model's own."""
    model, ids = build("llama").train(), IDS.repeat(2, 1)
    expected = step(model, ids)
    with swapped(everything(model)):
        same(step(model, ids), expected, 1e-5)
    assert "gated_linear" in calls
    assert "rotary" not in calls


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_keep_their_calls(dropout: float, calls: list[str]) -> None:
    adapter = LoraConfig(
        r=4,
        target_modules=["q_proj", "gate_proj", "down_proj"],
        init_lora_weights=False,
        lora_dropout=dropout,
        layers_to_transform=[0, 1],
    )
    with torch.random.fork_rng():
        model = get_peft_model(build("llama"), adapter).train()
    expected = step(model)
    swaps = everything(model)
    assert counts(swaps) == EXPECTED["llama"]
    with swapped(swaps):
        same(step(model), expected, 1e-5)
    assert calls.count("gated") == 2 + 1, "two by themselves, and one within"
    assert calls.count("gated_linear") == 1, "the layer without an adapter"


@pytest.mark.parametrize("kind", ["forward", "backward", "replaced"])
def test_a_hook_on_the_projection_is_called(kind: str, calls: list[str]) -> None:
    model, seen = build("llama").train(), []
    expected = step(model)
    down = model.model.layers[1].mlp.down_proj
    swaps = everything(model)
    if kind == "forward":
        down.register_forward_hook(lambda *_: seen.append(1))
    elif kind == "backward":
        down.register_full_backward_hook(lambda *_: seen.append(1))
    else:
        swaps.append(Swap(down, "forward", lambda x: seen.append(1) or nn.Linear.forward(down, x)))
    with swapped(swaps):
        same(step(model), expected, 1e-5)
    assert seen == [1]
    assert calls.count("gated_linear") == 2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_under_autocast(name: str) -> None:
    """Float32 weights, products in bfloat16: no further from float32 than the model's own layers."""
    model = build(name).train()
    exact = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(model)
        with swapped(everything(model, {torch.float32, torch.bfloat16})):
            fused = step(model)

    def distance(result: tuple[Tensor, dict[str, Tensor]]) -> float:
        squares = [((result[1][key] - g).norm() / g.norm()).square() for key, g in exact[1].items()]
        return torch.stack(squares).mean().sqrt().item()

    assert 0 < distance(fused) < 1.2 * distance(plain) < 0.2
    assert all(gradient.dtype is torch.float32 for gradient in fused[1].values())


def test_without_gradients_the_projection_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine's captured steps do: nothing is saved there by keeping less."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("gated_linear")

    model = build("llama")
    expected = model(input_ids=IDS).logits.detach()
    monkeypatch.setattr(layers, "gated_linear", refuse)
    with swapped(everything(model)):
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=IDS)


# ---- recognition


class Dropping(nn.Module):
    """A gated MLP with dropout that is no part of it."""

    def __init__(self, p: float):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj, self.act_fn, self.p = nn.Linear(12, 8), nn.SiLU(), p

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(inner, self.p, self.training))


@pytest.mark.parametrize("training", [False, True])
def test_an_mlp_with_dropout_is_left_alone_in_either_mode(training: bool) -> None:
    with torch.random.fork_rng():
        plain, dropping = Dropping(0.0).train(training), Dropping(0.5).train(training)
    assert len(everything(plain)) == 1
    assert everything(dropping) == []


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_recognition_leaves_no_trace(lora: bool, training: bool) -> None:
    model = build("qwen3")
    if lora:
        adapter = LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], lora_dropout=0.5)
        model = get_peft_model(model, adapter)
    model.train(training)
    next(model.modules()).training = not training  # modes may be mixed
    before = copy.deepcopy([(part.training, sorted(vars(part))) for part in model.modules()])
    values, state = [p.detach().clone() for p in model.parameters()], torch.random.get_rng_state()
    assert counts(everything(model)) == EXPECTED["qwen3"]
    assert [(part.training, sorted(vars(part))) for part in model.modules()] == before
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_on_a_cpu_only_norms_are_replaced() -> None:
    model = build("qwen3")
    assert counts(fused_swaps(model, {torch.float32})) == (13, 0, 0)
    assert counts(fused_swaps(model, {torch.float32}, everything=False)) == (13, 0, 0)


def test_a_weight_that_is_exchanged_is_the_one_that_counts() -> None:
    model = build("llama").train()
    swaps = everything(model)
    for part in model.modules():
        if "weight" in part._parameters and part.weight.dim() == 1:
            part.weight = nn.Parameter(part.weight.detach() * 1.5)
    expected = step(model)
    with swapped(swaps):
        same(step(model), expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPECTED)
def test_on_cuda(name: str, dtype: torch.dtype, checkpointing: bool) -> None:
    model, ids = build(name).train().cuda(), IDS.cuda()
    exact = cuda_step(model.double(), ids)
    model = build(name).train().to("cuda", dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    swaps = fused_swaps(model, {dtype})
    assert counts(swaps) == EXPECTED[name]
    plain = flat(cuda_step(model, ids))
    with swapped(swaps):
        fused = flat(cuda_step(model, ids))
    error, usual = ((x - flat(exact)).norm() / flat(exact).norm() for x in (fused, plain))
    print(f"{name} {dtype}: {error:.2e} where the model has {usual:.2e}")
    assert error < 1e-5 if dtype is torch.float32 else error < 2 * usual


def cuda_step(model: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits.double()
    weights = torch.linspace(-1, 2, logits.shape[-1], device=ids.device, dtype=torch.float64)
    (logits.log_softmax(-1) * weights).sum().backward()
    return [p.grad for p in model.parameters()]


def flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])
