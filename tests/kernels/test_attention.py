"""Packed attention with shared prompts, torch and Triton, against a loop over tokens in float64.

Without a GPU the Triton kernels run in Triton's interpreter, in blocks of 16 so that a few tokens make several. With
one they are compiled, and the tests marked `gpu` add real shapes.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import OutOfResources

from gruppo.kernels import attention
from gruppo.kernels.attention import Segments, packed_attention
from gruppo.kernels.gpu import attention as gpu
from gruppo.kernels.gpu.blocks import Blocks, launch_fitting
from tests import interpreter

interpreter.make_ready()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The interpreter computes NaN and -inf, on purpose, in numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*", "ignore::RuntimeWarning:numpy.*")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """What torch.empty returns is full of NaN: an element nobody writes shows."""
    torch.set_deterministic_debug_mode("warn")
    torch.manual_seed(0)
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (gpu.FORWARD_FLOAT, gpu.QUERIES_FLOAT, gpu.KEYS_FLOAT):
        for size in (16, 32):
            monkeypatch.setitem(table, size, (16, 16, 4, 1))


class Case(NamedTuple):
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    size: int = 16
    size_v: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return dict(scale=self.size**-0.5, window=self.window, softcap=self.softcap)

    def segments(self, device: str) -> Segments:
        return Segments.of(self.lengths, self.parents, device)

    def tensors(self) -> dict[str, Tensor]:
        tokens = sum(self.lengths)
        named = dict(
            query=torch.randn(tokens, self.heads, self.size, dtype=torch.float64),
            key=torch.randn(tokens, self.kv_heads, self.size, dtype=torch.float64),
            value=torch.randn(tokens, self.kv_heads, self.size_v, dtype=torch.float64),
        )
        if self.sinks:
            named["sinks"] = torch.linspace(-1, 2, self.heads, dtype=torch.float64)
        return named


def by_token(query: Tensor, key: Tensor, value: Tensor, case: Case, sinks: Tensor | None = None) -> Tensor:
    """The definition: for each token the list of those it sees, nearest last."""
    starts = [sum(case.lengths[:s]) for s in range(len(case.lengths))]
    out = []
    for s, parent in enumerate(case.parents):
        prompt = [] if parent < 0 else [starts[parent] + i for i in range(case.lengths[parent])]
        for j in range(case.lengths[s]):
            seen = (prompt + [starts[s] + i for i in range(j + 1)])[-(case.window or 10**9) :]
            for head in range(case.heads):
                kv = head // (case.heads // case.kv_heads)
                scores = key[seen, kv] @ query[starts[s] + j, head] * case.options["scale"]
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                out.append(scores.softmax(0)[: len(seen)] @ value[seen, kv])
    return torch.stack(out).view(len(query), case.heads, -1)


def with_gradients(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The result and the gradients of its product with some fixed numbers."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**leaves)
    weights = torch.linspace(-2, 3, out.numel(), dtype=torch.float64).sin().view(out.shape)
    out.backward(weights.to(out))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}  # type: ignore[dict-item]


def near(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, exact in expected.items():
        assert got[name].shape == exact.shape, name
        error = (got[name].cpu().double() - exact).abs().max() / exact.abs().max().clamp(min=1.0)
        assert error < tolerance, f"{name}: {error}"


GROUP = ((18, 3, 20), (-1, 0, 0))
CASES = {
    "one group": Case(*GROUP),
    "several groups": Case((3, 2, 4, 20, 7, 9, 1, 18), (-1, 0, 0, -1, 3, 3, -1, -1)),
    "lone": Case((20, 1, 33), (-1, -1, -1), heads=1),
    "single tokens": Case((1, 1, 1, 1, 16, 1, 1), (-1, 0, 0, -1, -1, 4, 4)),
    "at the edges": Case((16, 15, 16, 17, 32, 33), (-1, 0, 0, 0, -1, 4), heads=1),
    "groups of two heads": Case((17, 18, 2), (-1, 0, 0), heads=4, kv_heads=2),
    "groups of four heads": Case((17, 18, 2), (-1, 0, 0), heads=4, kv_heads=1),
    "size 24": Case(*GROUP, size=24, size_v=24),
    "sizes 24 and 16": Case(*GROUP, size=24),
    "sizes 16 and 20": Case(*GROUP, size_v=20),
    "window 1": Case(*GROUP, window=1),
    "window in the prompt": Case(*GROUP, window=7),
    "window as the prompt": Case(*GROUP, window=18),
    "window over the prompt": Case(*GROUP, window=30),
    "window over everything": Case(*GROUP, window=38),
    "window, lone": Case((40, 3), (-1, -1), window=17),
    "softcap": Case(*GROUP, softcap=0.7),
    "sinks": Case(*GROUP, sinks=True),
    "all at once": Case(*GROUP, size=24, size_v=20, window=21, softcap=1.5, sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_torch(name: str) -> None:
    case = CASES[name]
    tensors, segments = case.tensors(), case.segments("cpu")
    expected = with_gradients(lambda **t: by_token(case=case, **t), tensors)
    got = with_gradients(lambda **t: packed_attention(segments=segments, **case.options, **t), tensors)
    near(got, expected, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_torch_in_several_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CELLS_PER_CALL", 0)
    test_torch(name)
    case = Case(*GROUP)
    assert len(attention._batches(case.segments("cpu"), None)[0]) > 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_triton(name: str, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES_PER_SUM", 17)  # partial sums that end inside a child and inside a block
    case = CASES[name]
    tensors, segments = case.tensors(), case.segments(DEVICE)
    expected = with_gradients(lambda **t: by_token(case=case, **t), tensors)
    on_device = {name: x.float().to(DEVICE) for name, x in tensors.items()}
    got = with_gradients(lambda **t: gpu.packed_attention(segments=segments, **case.options, **t), on_device)
    assert got["out"].is_contiguous()
    near(got, expected, 1e-5)


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of one projection's result, columns next to each other."""
    tokens = len(tensors["query"])
    widths = [x[0].numel() for x in tensors.values()]
    both = torch.cat([x.flatten(1) for x in tensors.values()], dim=1)
    parts = both.split(widths, dim=1)
    return {name: part.view(tokens, *x.shape[1:]) for part, (name, x) in zip(parts, tensors.items(), strict=True)}


def by_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Memory in the order (1, H, N, D), as a model that concatenates keys has it."""
    return {name: x.transpose(0, 1).contiguous()[None][0].transpose(0, 1) for name, x in tensors.items()}


def last_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Neighbours in a head are not neighbours in memory."""
    return {name: x.transpose(0, 2).contiguous().transpose(0, 2) for name, x in tensors.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("view", [fused, by_head, last_apart])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_views(backend: str, view: Callable[..., dict[str, Tensor]], small_blocks: None) -> None:
    case = CASES["groups of two heads"]
    function, device = (packed_attention, "cpu") if backend == "torch" else (gpu.packed_attention, DEVICE)
    tensors = {name: x.float() for name, x in case.tensors().items()}
    views = view({name: x.to(device) for name, x in tensors.items()})
    assert not any(x.is_contiguous() for x in views.values())
    expected = with_gradients(lambda **t: by_token(case=case, **t), {name: x.double() for name, x in tensors.items()})
    segments = case.segments(device)

    def attend(**leaves: Tensor) -> Tensor:
        out = function(segments=segments, **case.options, **leaves)
        return out.transpose(0, 1).contiguous().transpose(0, 1)  # so that its gradient is a view as well

    near(with_gradients(attend, views), expected, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_gradient_that_is_one_number(backend: str, small_blocks: None) -> None:
    case = CASES["groups of two heads"]
    function, device = (packed_attention, "cpu") if backend == "torch" else (gpu.packed_attention, DEVICE)
    value = case.tensors()["value"].float().to(device).requires_grad_()
    rest = {name: x.float().to(device) for name, x in case.tensors().items() if name != "value"}
    function(value=value, segments=case.segments(device), **rest, **case.options).sum().backward()
    # Every query hands out a weight of one, so all values together get one for each query head and number.
    assert value.grad is not None
    assert value.grad.sum().item() == pytest.approx(sum(case.lengths) * case.heads * case.size_v, rel=1e-5)


def test_float16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (gpu.FORWARD_HALF, gpu.QUERIES_HALF, gpu.KEYS_HALF):
        monkeypatch.setitem(table, 16, (16, 16, 4, 1))
    case = CASES["all at once"]._replace(size=16, size_v=16)
    tensors = {name: x.half() for name, x in case.tensors().items()}
    segments = case.segments(DEVICE)
    expected = with_gradients(lambda **t: by_token(case=case, **t), {name: x.double() for name, x in tensors.items()})
    got = with_gradients(
        lambda **t: gpu.packed_attention(segments=segments, **case.options, **t),
        {name: x.to(DEVICE) for name, x in tensors.items()},
    )
    assert all(x.dtype == torch.float16 for x in got.values())
    near(got, expected, 5e-3)


def test_on_a_gpu_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward refuse the blocks of the table, 32 × 32, and settle for smaller ones."""
    launched: list[Blocks] = []

    def tight(launch: Callable[[Blocks], None], blocks: Blocks, kind: Any) -> None:
        def refuse(smaller: Blocks) -> None:
            if smaller.queries * smaller.keys > 16 * 32:
                raise OutOfResources(2, 1, "shared memory")
            launched.append(smaller)
            launch(smaller)

        launch_fitting(refuse, blocks, (kind, refuse))

    monkeypatch.setattr(gpu, "launch_fitting", tight)
    case = CASES["all at once"]
    tensors, segments = case.tensors(), case.segments(DEVICE)
    expected = with_gradients(lambda **t: by_token(case=case, **t), tensors)
    on_device = {name: x.float().to(DEVICE) for name, x in tensors.items()}
    got = with_gradients(lambda **t: gpu.packed_attention(segments=segments, **case.options, **t), on_device)
    assert launched == [Blocks(16, 32, 4, 1)] * 3
    near(got, expected, 1e-5)


def test_blocks_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((20, 40, 35), (-1, 0, 0), heads=1)
    tensors, segments = case.tensors(), case.segments(DEVICE)
    expected = with_gradients(lambda **t: by_token(case=case, **t), tensors)
    for block_m, block_n in ((16, 32), (32, 16)):
        for table in (gpu.FORWARD_FLOAT, gpu.QUERIES_FLOAT, gpu.KEYS_FLOAT):
            monkeypatch.setitem(table, 16, (block_m, block_n, 4, 1))
        on_device = {name: x.float().to(DEVICE) for name, x in tensors.items()}
        got = with_gradients(lambda **t: gpu.packed_attention(segments=segments, **case.options, **t), on_device)
        near(got, expected, 1e-5)


# ---- segments


def test_positions() -> None:
    segments = Segments.of((3, 2, 4, 5), (-1, 0, 0, -1), "cpu")
    assert segments.tokens == 14
    assert segments.bounds.tolist() == [0, 3, 5, 9, 14]
    assert segments.bounds.dtype == torch.int32
    assert segments.positions().tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    assert segments.positions().dtype == torch.int64


def test_every_pair_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES_PER_SUM", 4)
    segments = Segments.of((3, 2, 4, 5, 6, 2), (-1, 0, 0, 0, -1, 4), "cpu")
    read = []
    for r in segments.readings:
        pairs = [(q, k) for q in range(r.queries) for k in range(r.keys) if k <= q or not r.causal]
        read += [(r.query_start + q, r.key_start + k) for q, k in pairs]
    starts = segments.bounds.tolist()
    expected = []
    for s, parent in enumerate(segments.parents):
        for query in range(starts[s], starts[s + 1]):
            before = [] if parent < 0 else range(starts[parent], starts[parent + 1])
            expected += [(query, k) for k in (*before, *range(starts[s], query + 1))]
    assert sorted(read) == sorted(expected)
    rows = [r.sum_row + i for r in segments.readings if r.sum_row >= 0 for i in range(r.keys)]
    assert sorted(rows) == list(range(segments.sum_rows))
    assert segments.sum_rows == 3 * (1 + 3) + 6 * (1 + 1)


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((3, 2), (-1,), "one parent per length, not 1 for 2"),
        ((3, 0), (-1, 0), "not 0"),
        ((3, 2), (1, -1), "segment 0"),
        ((3, 2), (-1, 1), "segment 1"),
        ((3, 2, 2), (-1, 0, 1), "segment 2"),
        ((3, 2, 2), (-1, -1, 0), "segment 2"),
    ],
)
def test_impossible_segments(lengths: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segments.of(lengths, parents, "cpu")


def test_tables_are_made_once() -> None:
    case = CASES["window in the prompt"]
    segments, tensors = case.segments("cpu"), case.tensors()
    packed_attention(segments=segments, **case.options, **tensors)
    first = segments.keep(("batches", 7), lambda: None)
    packed_attention(segments=segments, **case.options, **tensors)
    assert first is not None
    assert segments.keep(("batches", 7), lambda: None) is first


# ---- the public function


def test_an_empty_pack() -> None:
    segments = Segments.of((), (), DEVICE)
    query, key, value = (torch.randn(0, heads, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2))
    out = packed_attention(query, key, value, segments, scale=0.25)
    out.sum().backward()
    assert out.shape == (0, 4, 16)
    assert segments.positions().shape == (0,)


def test_wrong_calls() -> None:
    case = CASES["one group"]
    segments, (query, key, value) = case.segments("cpu"), case.tensors().values()
    with pytest.raises(ValueError, match="as the segments do"):
        packed_attention(query[:-1], key, value, segments, scale=1.0)
    with pytest.raises(ValueError, match="one dtype"):
        packed_attention(query, key.float(), value, segments, scale=1.0)
    with pytest.raises(ValueError, match="positive"):
        packed_attention(query, key, value, segments, scale=-1.0)


@pytest.mark.parametrize("name", ["one group", "softcap"])
def test_autocast(name: str) -> None:
    case = CASES[name]
    segments, tensors = case.segments("cpu"), {name: x.float() for name, x in case.tensors().items()}
    tensors["value"] = tensors["value"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = packed_attention(segments=segments, **case.options, **tensors)
    rounded = {name: x.bfloat16().double() for name, x in tensors.items()}
    assert got.dtype == torch.bfloat16
    near({"out": got}, {"out": by_token(case=case, **rounded)}, 1e-2)


def test_cpu_tensors_need_no_triton() -> None:
    code = (
        "import sys, torch; from gruppo.kernels.attention import Segments, packed_attention; x = torch.ones(2, 1, 4);"
        "packed_attention(x, x, x, Segments.of((2,), (-1,), 'cpu'), scale=1.0)"
    )
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'gruppo.kernels.gpu.softmax' not in sys.modules"], check=True
    )


# ---- real shapes, compiled

LENGTHS = (200, 500, 512, 37, 499, 601, 128, 1, 450, 333, 64, 480, 520, 700, 511, 90, 256, 150, 65)
PARENTS = (-1, *[0] * 16, -1, 17)
REAL = {
    "128": Case(LENGTHS, PARENTS, 12, 2, 128, 128),
    "64": Case(LENGTHS, PARENTS, 9, 3, 64, 64),
    "80": Case(LENGTHS, PARENTS, 4, 4, 80, 80),
    "window": Case(LENGTHS, PARENTS, 4, 2, 128, 128, window=150),
    "softcap, 256": Case(LENGTHS, PARENTS, 4, 2, 256, 256, softcap=5.0),
    "sinks, window": Case(LENGTHS, PARENTS, 8, 2, 64, 64, window=128, sinks=True),
    "192 and 128": Case(LENGTHS, PARENTS, 4, 4, 192, 128),
}
# The result and the weights in it are rounded, and in the gradient what they are multiplied with.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2.5e-3}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def at_size(name: str, dtype: torch.dtype) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    case = REAL[name]
    segments = case.segments("cuda")
    tensors = {name: x.to(dtype).cuda() for name, x in case.tensors().items()}
    return lambda **t: packed_attention(segments=segments, **case.options, **t), tensors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("name", REAL)
def test_at_size(name: str, dtype: torch.dtype) -> None:
    function, tensors = at_size(name, dtype)
    expected = with_gradients(function, {name: x.double() for name, x in tensors.items()})
    got = with_gradients(function, tensors)
    errors = {name: relative_error(got[name], exact) for name, exact in expected.items()}
    assert all(error < BOUND[dtype] for error in errors.values()), errors


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    function, tensors = at_size("128", torch.bfloat16)
    first = with_gradients(function, tensors)
    for _ in range(3):
        again = with_gradients(function, tensors)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.gpu
def test_places_beyond_two_to_the_31_elements() -> None:
    case = Case((250, 300), (-1, 0), 4, 2, 128, 128)
    tensors = {name: x.bfloat16().cuda() for name, x in case.tensors().items()}
    segments = case.segments("cuda")
    expected = with_gradients(lambda **t: packed_attention(segments=segments, **case.options, **t), tensors)
    # The same tokens with the last of them more than 2³¹ elements from the first.
    stride = math.ceil(2**31 / 500) // 16 * 16
    wide = {}
    for name, x in tensors.items():
        memory = torch.zeros(len(x) * stride, dtype=x.dtype, device="cuda")
        wide[name] = memory.as_strided(x.shape, (stride, x.shape[2], 1)).copy_(x)
        assert (len(x) - 1) * wide[name].stride(0) > 2**31
    got = with_gradients(lambda **t: packed_attention(segments=segments, **case.options, **t), wide)
    assert all(torch.equal(got[name], x) for name, x in expected.items())
