"""Norms, rotary embedding and gated activation, torch and Triton, forward and backward, against float64.

Without a GPU the Triton kernels run in Triton's interpreter: same code, tiny shapes, no bfloat16 products. With one
everything here is compiled, and the tests marked `gpu` add real shapes.
"""

import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gruppo.kernels import layers
from gruppo.kernels.gpu import layers as gpu_layers
from gruppo.kernels.gpu import norm as gpu_norm
from tests import interpreter

interpreter.make_ready()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes what overflows, on purpose, in numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}


class Backend(NamedTuple):
    layers: ModuleType
    device: str


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "torch":
        return Backend(layers, "cpu")
    return Backend(gpu_layers, DEVICE)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """What torch.empty returns is full of NaN: an element nobody writes shows."""
    torch.set_deterministic_debug_mode("warn")
    torch.manual_seed(0)
    yield
    torch.set_deterministic_debug_mode("default")


def near(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal to so much of the largest element."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    bound = TOLERANCE[dtype] * expected.abs().max().item()
    torch.testing.assert_close(got.detach().cpu().double(), expected.double(), rtol=0, atol=bound)


# ---- what they compute, in float64 or whatever comes in


def exact_norm(x: Tensor, weight: Tensor, plus_one: bool = False) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (weight + plus_one)


def exact_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    one, two = x[..., : turned // 2], x[..., turned // 2 : turned]
    rotated = x[..., :turned] * cos[:, None] + torch.cat((-two, one), -1) * sin[:, None]
    return torch.cat((rotated, x[..., turned:]), -1)


def exact_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    inner = gate if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(inner) * up


Layer = Callable[..., Any]


def run(layer: Layer, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What a layer returns for these inputs and their gradients, for those of its results."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = layer(*leaves)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    return outputs, list(torch.autograd.grad(outputs, leaves, list(grads)))


def agree(
    ours: Layer, exact: Layer, inputs: Sequence[Tensor], grads: Sequence[Tensor], device: str, dtype: torch.dtype
) -> None:
    """Outputs and gradients of one against those of the other in float64."""
    wide = run(exact, [x.double() for x in inputs], [g.double() for g in grads])
    got = run(ours, [x.to(device) for x in inputs], [g.to(device) for g in grads])
    for results, expected in zip(got, wide, strict=True):
        assert len(results) == len(expected)
        for a, b in zip(results, expected, strict=True):
            near(a, b, dtype)


# ---- norms

VIEWS = {
    "rows": lambda: torch.randn(2, 3, 48),
    "one row": lambda: torch.randn(1, 1500),
    "long rows": lambda: torch.randn(4, 5000),
    "a vector": lambda: torch.randn(20),
    "heads of a projection": lambda: torch.randn(1, 5, 320).view(1, 5, 4, 80).transpose(1, 2),
    "part of a row": lambda: torch.randn(6, 3, 100)[..., :72],
    "three strides": lambda: torch.randn(3, 4, 5, 16).permute(2, 0, 1, 3)[:, ::2],
    "many rows": lambda: torch.randn(7, 100, 3, 48).transpose(1, 2),
}
NORMS = [(False, False), (False, True), (True, True)]  # Llama, OLMo 2, Gemma


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("plus_one", "wide"), NORMS)
@pytest.mark.parametrize("view", VIEWS)
def test_rms_norm(backend: Backend, view: str, plus_one: bool, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_norm, "_NORM_PROGRAMS", 3)  # of many rows, each has several blocks
    x = VIEWS[view]()
    weight, grad = torch.randn(x.shape[-1]), torch.randn(x.shape[::-1]).permute(*reversed(range(x.dim())))
    options = dict(plus_one=plus_one, in_float32_weight=wide)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        out = backend.layers.rms_norm(x, weight, 1e-3, **options)
        assert out.is_contiguous()
        with torch.no_grad():
            assert torch.equal(backend.layers.rms_norm(x, weight, 1e-3, **options), out)
        return out

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return exact_norm(x, weight, plus_one)

    agree(ours, exact, [x, weight], [grad], backend.device, torch.float32)


def test_a_norm_in_half_precision(backend: Backend) -> None:
    x, weight, grad = torch.randn(9, 200).half(), torch.randn(200).half(), torch.randn(9, 200).half()

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return backend.layers.rms_norm(x, weight, 1e-3, plus_one=False, in_float32_weight=False)

    agree(ours, exact_norm, [x, weight], [grad], backend.device, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_rms_norm_rounds_where_the_models_do(backend: Backend, dtype: torch.dtype) -> None:
    x, weight = torch.randn(64, 256).to(dtype), torch.randn(256).to(dtype)
    normal = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = {False: weight * normal.to(dtype), True: (weight.float() * normal).to(dtype)}
    assert (expected[False] == expected[True]).float().mean() < 0.9
    for wide, values in expected.items():
        args = (x.to(backend.device), weight.to(backend.device), 1e-6)
        got = backend.layers.rms_norm(*args, plus_one=False, in_float32_weight=wide)
        assert (got.cpu() == values).float().mean() > 0.99  # the statistics may differ in their last bit
        widened = backend.layers.rms_norm(*args, plus_one=False, in_float32_weight=wide, out_dtype=torch.float32)
        # Without a last rounding: the product itself, of what was or was not rounded before.
        product = weight.float() * (normal if wide else normal.to(dtype).float())
        assert widened.dtype == torch.float32
        assert ((widened.cpu() - product).abs() < 1e-6).float().mean() > 0.99


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(backend: Backend, frozen: int) -> None:
    inputs = [torch.randn(5, 40), torch.randn(40)]
    leaves = [x.to(backend.device).requires_grad_(i != frozen) for i, x in enumerate(inputs)]
    backend.layers.rms_norm(*leaves, 1e-3, plus_one=False, in_float32_weight=False).sum().backward()
    _, expected = run(exact_norm, [x.double() for x in inputs], [torch.ones(5, 40).double()])
    assert leaves[frozen].grad is None
    assert leaves[1 - frozen].grad is not None
    near(leaves[1 - frozen].grad, expected[1 - frozen])


# ---- rotary embedding


@pytest.mark.parametrize(("size", "turned"), [(64, 64), (80, 80), (80, 32), (96, 40)])
def test_rotary(backend: Backend, size: int, turned: int) -> None:
    query, key = torch.randn(1, 3, 6, size).transpose(1, 2), torch.randn(1, 2, 3, size + 4)[..., :size]
    cos, sin = torch.randn(1, 3, turned), torch.randn(1, 3, 2 * turned)[..., turned:]
    grads = [torch.randn(1, 6, 3, size), torch.randn(1, size, 3, 2).transpose(1, 3)]

    def ours(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        factors = cos.to(backend.device), sin.to(backend.device)
        rotated = backend.layers.rotary(query, key, *factors)
        assert all(out.transpose(1, 2).is_contiguous() for out in rotated)
        with torch.no_grad():
            again = backend.layers.rotary(query, key, *factors)
        assert all(torch.equal(a, b) for a, b in zip(rotated, again, strict=True))
        return rotated

    def exact(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return exact_rotary(query, cos.double(), sin.double()), exact_rotary(key, cos.double(), sin.double())

    agree(ours, exact, [query, key], grads, backend.device, torch.float32)


def test_a_key_alone_may_want_a_gradient(backend: Backend) -> None:
    query, key = torch.randn(1, 4, 3, 32, device=backend.device), torch.randn(1, 2, 3, 32)
    cos, sin = torch.randn(2, 1, 3, 32)
    leaf = key.to(backend.device).requires_grad_()
    _, rotated = backend.layers.rotary(query, leaf, cos.to(backend.device), sin.to(backend.device))
    rotated.sum().backward()  # a gradient whose strides are all zero
    (_, (expected,)) = run(
        lambda k: exact_rotary(k, cos.double(), sin.double()), [key.double()], [torch.ones(1, 2, 3, 32).double()]
    )
    assert leaf.grad is not None
    near(leaf.grad, expected)


# ---- gated activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(backend: Backend, activation: str, dtype: torch.dtype) -> None:
    gate, up = (torch.randn(2, 3, 2 * 2500) * 4).to(dtype).chunk(2, -1)
    grad = torch.randn(2500, 2, 3).to(dtype).permute(1, 2, 0)

    def ours(gate: Tensor, up: Tensor) -> Tensor:
        out = backend.layers.gated(gate, up, activation=activation)
        assert out.is_contiguous()
        with torch.no_grad():
            assert torch.equal(backend.layers.gated(gate, up, activation=activation), out)
        return out

    def exact(gate: Tensor, up: Tensor) -> Tensor:
        return exact_gated(gate, up, activation)

    agree(ours, exact, [gate, up], [grad], backend.device, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_far_from_zero_it_is_zero_or_the_identity(backend: Backend, activation: str) -> None:
    gate = torch.tensor([[-1e4, -60.0, 60.0, 1e4]], device=backend.device, requires_grad=True)
    out = backend.layers.gated(gate, torch.ones_like(gate), activation=activation)
    out.sum().backward()
    assert gate.grad is not None
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 0.0, 60.0, 1e4]]))
    torch.testing.assert_close(gate.grad.cpu(), torch.tensor([[0.0, 0.0, 1.0, 1.0]]))


def test_an_unknown_activation_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="silu"):
        backend.layers.gated(torch.ones(2), torch.ones(2), activation="relu")


def projected(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(exact_gated(gate, up, "silu"), weight, bias)


@pytest.mark.parametrize("biased", [False, True])
def test_gated_linear(backend: Backend, biased: bool) -> None:
    inputs = [torch.randn(2, 3, 70), torch.randn(3, 2, 70).transpose(0, 1), torch.randn(20, 70)]
    inputs += [torch.randn(20)] if biased else []

    def ours(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = backend.layers.gated_linear(gate, up, weight, activation="silu", bias=bias)
        with torch.no_grad():
            assert torch.equal(backend.layers.gated_linear(gate, up, weight, activation="silu", bias=bias), out)
        return out

    agree(ours, projected, inputs, [torch.randn(20, 2, 3).permute(1, 2, 0)], backend.device, torch.float32)
    if backend.layers is layers:
        doubles = [x.double() for x in inputs]
        agree(ours, projected, doubles, [torch.randn(2, 3, 20).double()], backend.device, torch.float64)


def test_a_frozen_projection(backend: Backend) -> None:
    gate, up, weight = torch.randn(5, 33), torch.randn(5, 33), torch.randn(7, 33)
    leaf, frozen = gate.to(backend.device).requires_grad_(), weight.to(backend.device)
    out = backend.layers.gated_linear(leaf, up.to(backend.device), frozen, activation="silu")
    out.sum().backward()
    _, expected = run(projected, [x.double() for x in (gate, up, weight)], [torch.ones(5, 7).double()])
    assert leaf.grad is not None
    near(leaf.grad, expected[0])
    assert frozen.grad is None


def test_the_product_is_not_kept() -> None:
    gate, up, weight = (torch.randn(*shape, device=DEVICE) for shape in ((40, 64), (40, 64), (8, 64)))
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gpu_layers.gated_linear(*(x.requires_grad_() for x in (gate, up, weight)), activation="silu")
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (gate, up, weight)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gated_linear_under_autocast(device: str) -> None:
    gate, up = (torch.randn(4, 32, device=device).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.randn(8, 32, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out = layers.gated_linear(gate, up, weight, activation="silu")
        expected = functional.linear(layers.gated(gate, up, activation="silu"), weight)
    out.sum().backward()
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


# ---- the choice between them


def test_both_modules_offer_the_same_functions() -> None:
    assert layers.__all__ == gpu_layers.__all__
    for name in layers.__all__:
        assert inspect.signature(getattr(layers, name)) == inspect.signature(getattr(gpu_layers, name))


def test_cpu_tensors_need_no_triton() -> None:
    code = (
        "import sys, torch; from gruppo.kernels import layers; "
        "layers.gated_linear(torch.ones(2), torch.ones(2), torch.ones(2, 2), activation='silu')"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'gruppo.kernels.gpu' not in sys.modules"], check=True)


def test_a_second_derivative_is_refused(backend: Backend) -> None:
    x = torch.randn(3, 8, device=backend.device, requires_grad=True)
    weight = torch.ones(8, device=backend.device)
    out = backend.layers.rms_norm(x, weight, 1e-3, plus_one=False, in_float32_weight=False)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)  # of squares, whose gradient has one
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- real shapes, compiled


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (1 + weight.float())).to(x.dtype)


def factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of bfloat16 in the type of x."""
    angles = (torch.arange(4096)[:, None] * 10_000 ** -torch.linspace(0, 1, 64)).repeat(1, 2)[None]
    return angles.cos().bfloat16().to(x), angles.sin().bfloat16().to(x)


class Real(NamedTuple):
    """A layer at the size that a model has it: ours, what models do in bfloat16, and the exact one.

    Four dimensions are [1, heads, tokens, D], and lie in memory as [tokens, heads, D].
    """

    shapes: list[tuple[int, ...]]
    ours: Layer
    plain: Layer
    exact: Layer


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return layers.rms_norm(x, weight, 1e-3, plus_one=False, in_float32_weight=False)


REAL = {
    "norm": Real([(4096, 1536), (1536,)], norm, llama_norm, exact_norm),
    "norm of 8192": Real([(1000, 8192), (8192,)], norm, llama_norm, exact_norm),
    "norm of heads": Real([(1, 12, 4096, 128), (128,)], norm, llama_norm, exact_norm),
    "gemma": Real(
        [(4096, 2304), (2304,)],
        lambda x, weight: layers.rms_norm(x, weight, 1e-3, plus_one=True, in_float32_weight=True),
        gemma_norm,
        lambda x, weight: exact_norm(x, weight, True),
    ),
    "rotary": Real(
        [(1, 12, 4096, 128), (1, 2, 4096, 128)],
        lambda q, k: layers.rotary(q, k, *factors(q)),
        lambda q, k: (exact_rotary(q, *factors(q)), exact_rotary(k, *factors(k))),
        lambda q, k: (exact_rotary(q, *factors(q)), exact_rotary(k, *factors(k))),
    ),
    **{
        activation: Real(
            [(4096, 8960), (4096, 8960)],
            lambda x, up, a=activation: layers.gated(x, up, activation=a),
            lambda gate, up, f=function: f(gate) * up,
            lambda gate, up, a=activation: exact_gated(gate, up, a),
        )
        for activation, function in {
            "silu": functional.silu,
            "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        }.items()
    },
    "gated linear": Real(
        [(4096, 8960), (4096, 8960), (1536, 8960)],
        lambda gate, up, weight: layers.gated_linear(gate, up, weight, activation="silu"),
        lambda gate, up, weight: functional.linear(functional.silu(gate) * up, weight),
        projected,
    ),
}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_at_size_in_bfloat16(name: str) -> None:
    case = REAL[name]
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in case.shapes]
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in inputs]
    with torch.no_grad():
        out = case.ours(*inputs)
    outputs = [out] if isinstance(out, Tensor) else out
    grads = [torch.randn_like(x) for x in outputs]
    ours, again, plain = (run(layer, inputs, grads) for layer in (case.ours, case.ours, case.plain))
    exact = run(case.exact, [x.double() for x in inputs], [g.double() for g in grads])
    for a, b in zip(ours[1], again[1], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(outputs, ours[0], strict=True):
        assert torch.equal(a, b)
    for got, usual, expected in zip(*([*results[0], *results[1]] for results in (ours, plain, exact)), strict=True):
        assert got.dtype is torch.bfloat16
        error, bound = relative_error(got, expected), relative_error(usual, expected)
        print(f"{name} {tuple(got.shape)}: {error:.2e} where torch has {bound:.2e}")
        assert error < 2 * bound
        assert error < 1e-2
