"""The engine's operations, torch and Triton, against loops in float64.

Without a GPU the Triton kernels run in Triton's interpreter: same code, tiny shapes, no bfloat16 products. With one
everything here is compiled, and the tests marked `gpu` add real shapes.
"""

import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.engine import kernels, noise, ops, reference
from gruppo.engine.kernels import decode, prefill
from gruppo.engine.kernels.sampling import draw_words
from gruppo.kernels.gpu.blocks import Blocks
from tests import interpreter

interpreter.make_ready()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The interpreter computes NaN and -inf, on purpose, in numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*", "ignore::RuntimeWarning:numpy.*")


class Backend(NamedTuple):
    ops: ModuleType
    device: str


def smallest(launch: Callable[[Blocks], None], blocks: Blocks, kind: Hashable) -> None:
    """Instead of `launch_fitting`: as on a GPU with so little shared memory that only the smallest blocks fit."""
    while (smaller := blocks.smaller()) is not None:
        blocks = smaller
    launch(blocks)


@pytest.fixture(params=["torch", "triton", "triton, small blocks"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "torch":
        return Backend(reference, "cpu")
    if request.param != "triton":
        monkeypatch.setattr(decode, "launch_fitting", smallest)
        monkeypatch.setattr(prefill, "launch_fitting", smallest)
    return Backend(kernels, DEVICE)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Any:
    """What torch.empty returns is full of NaN: an element nobody writes shows."""
    torch.set_deterministic_debug_mode("warn")
    torch.manual_seed(0)
    yield
    torch.set_deterministic_debug_mode("default")


def attend(q: Tensor, keys: Tensor, values: Tensor, case: "Case", sinks: Tensor | None) -> Tensor:
    """The query [H, D] at the position of the last key, over keys [L, Hkv, D] and values: [H, Dv] in float64."""
    out, length = [], len(keys)
    back = torch.arange(length - 1, -1, -1)
    for head in range(len(q)):
        kv = head // (len(q) // keys.shape[1])
        scores = keys[:, kv].double() @ q[head].double() * case.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.window is not None:
            scores[back >= case.window] = -math.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1].cpu().double()])
        out.append(scores.softmax(0)[:length] @ values[:, kv].double())
    return torch.stack(out)


class Case(NamedTuple):
    heads: int
    kv_heads: int
    size: int
    size_v: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.size**-0.5

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.dtype)

    def options(self, device: str) -> dict[str, Any]:
        sinks = torch.linspace(-1, 3, self.heads).to(device) if self.sinks else None
        return dict(scale=self.scale, window=self.window, softcap=self.softcap, sinks=sinks)


CASES = {
    "multi-head": Case(3, 3, 64, 64),
    "grouped": Case(6, 2, 64, 64),
    "one key head": Case(4, 1, 80, 80),
    "96, small window": Case(4, 2, 96, 96, window=7),
    "128, window, capped": Case(2, 1, 128, 128, window=70, softcap=2.0),
    "sinks": Case(4, 2, 64, 64, sinks=True),
    "192 and 128": Case(2, 2, 192, 128),
    "256, all at once": Case(2, 1, 256, 256, window=40, softcap=3.0, sinks=True),
    "float16": Case(4, 2, 64, 64, window=5, dtype=torch.float16),
}
PLACES = 420


def near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    tolerance = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    torch.testing.assert_close(got.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)


def pools(case: Case) -> list[Tensor]:
    """Nothing but NaN: a place that is read without having been written shows."""
    return [torch.full((PLACES, case.kv_heads, size), math.nan, dtype=case.dtype) for size in (case.size, case.size_v)]


# ---- attention

# Prompts at [10, 140) and [150, 151); rows 0 and 1 share the first. (prompt start, length, tail start, length)
ROWS = [(10, 130, 200, 1), (10, 130, 210, 3), (0, 0, 220, 1), (150, 1, 300, 70)]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_decode_attention(backend: Backend, name: str, splits: int, shared: bool) -> None:
    case = CASES[name]
    pool_k, pool_v = pools(case)
    for start, length in {(row[i], row[i + 1]) for row in ROWS for i in (0, 2)}:
        pool_k[start : start + length] = case.random(length, case.kv_heads, case.size)
        pool_v[start : start + length] = case.random(length, case.kv_heads, case.size_v)
    query = case.random(case.heads, len(ROWS), case.size).transpose(0, 1)  # as the model gives it: strided
    context = torch.tensor(ROWS).T.contiguous().to(backend.device)
    options = case.options(backend.device)
    tensors = (tensor.to(backend.device) for tensor in (query, pool_k, pool_v))
    got = backend.ops.decode_attention(*tensors, *context, **options, splits=splits, shared=shared)
    expected = []
    for q, (prompt, prompt_len, tail, tail_len) in zip(query, ROWS, strict=True):
        places = [*range(prompt, prompt + prompt_len), *range(tail, tail + tail_len)]
        expected.append(attend(q, pool_k[places], pool_v[places], case, options["sinks"]))
    near(got, torch.stack(expected), case.dtype)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_without_keys_disturbs_nobody(splits: int) -> None:
    """The idle rows of a graph's batch have length 0."""
    case = CASES["grouped"]
    pool = torch.full((PLACES, case.kv_heads, case.size), math.nan, device=DEVICE)
    pool[7] = 2.0
    zero, one = torch.tensor([0, 0], device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    query = torch.randn(2, case.heads, case.size, device=DEVICE)
    got = kernels.decode_attention(query, pool, pool, zero, zero, zero + 7, one, **case.options(DEVICE), splits=splits)
    assert (got[0] == 0).all()
    assert (got[1] == 2).all()


# (pool start, tokens from before, new tokens). The first is longer than a block of keys; the third has nothing new.
SEQUENCES = [(0, 0, 72), (80, 45, 5), (140, 3, 0), (150, 0, 1), (160, 17, 40)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_prefill_attention(backend: Backend, name: str) -> None:
    case = CASES[name]
    pool_k, pool_v = pools(case)
    for start, past, new in SEQUENCES:
        pool_k[start : start + past + new] = case.random(past + new, case.kv_heads, case.size)
        pool_v[start : start + past + new] = case.random(past + new, case.kv_heads, case.size_v)
    starts, past, counts = torch.tensor(SEQUENCES).T.contiguous().to(backend.device)
    cu_query = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    query = case.random(case.heads, int(counts.sum()), case.size).transpose(0, 1)
    options = case.options(backend.device)
    tensors = (tensor.to(backend.device) for tensor in (query, pool_k, pool_v))
    got = backend.ops.prefill_attention(*tensors, starts, past, cu_query, max_query=int(counts.max()), **options)
    expected = {}
    for (start, before, new), first in zip(SEQUENCES, cu_query.tolist(), strict=False):
        for i in sorted({0, 1, new // 2, new - 1} & set(range(new))):  # the loops are slow; these see every edge
            places = slice(start, start + before + i + 1)
            expected[first + i] = attend(query[first + i], pool_k[places], pool_v[places], case, options["sinks"])
    assert not got.isnan().any()
    near(got[list(expected)], torch.stack(list(expected.values())), case.dtype)


def test_a_prompt_in_chunks_is_the_prompt_at_once(backend: Backend) -> None:
    case = CASES["128, window, capped"]
    keys, query = (case.random(50, heads, case.size).to(backend.device) for heads in (case.kv_heads, case.heads))
    zero = torch.tensor([0], device=backend.device)
    options = case.options(backend.device)

    def prefill(first: int, last: int) -> Tensor:
        cu_query = torch.tensor([0, last - first], dtype=torch.int32, device=backend.device)
        return backend.ops.prefill_attention(
            query[first:last], keys, keys, zero, zero + first, cu_query, max_query=last - first, **options
        )

    torch.testing.assert_close(torch.cat([prefill(0, 20), prefill(20, 33), prefill(33, 50)]), prefill(0, 50))


@pytest.mark.parametrize(("heads", "size", "size_v"), [(2, 64, 64), (3, 80, 48)])
def test_write_kv_writes_its_places_and_no_other(backend: Backend, heads: int, size: int, size_v: int) -> None:
    pool_k, pool_v = torch.full((9, heads, size), math.nan), torch.full((9, heads, size_v), math.nan)
    keys, values = torch.randn(heads, 3, size).transpose(0, 1), torch.randn(3, 2, heads, size_v)[:, 1]
    places = torch.tensor([7, 0, 4])
    on_device = [tensor.to(backend.device) for tensor in (pool_k, pool_v)]
    backend.ops.write_kv(keys.to(backend.device), values.to(backend.device), *on_device, places.to(backend.device))
    for row, place in enumerate(places.tolist()):
        pool_k[place], pool_v[place] = keys[row], values[row]
    for got, expected in zip(on_device, (pool_k, pool_v), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_small_batches_are_split() -> None:
    assert [ops.choose_splits(batch, 2) for batch in (1, 8, 16, 64, 100, 132, 512)] == [32, 32, 16, 4, 2, 1, 1]
    assert ops.choose_splits(16, 32) == 1


# ---- sampling


def sample_exactly(x: Tensor, words: Tensor, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and entropies of x [B, V] in float64."""
    x, v = x.double(), (words.double() + 0.5) / 2**32
    noisy = x if greedy else x - (-torch.log1p(-v)).log()
    tokens = torch.stack([(row == row.max()).nonzero()[0, 0] for row in noisy])
    logps = x.log_softmax(-1)
    entropies = -(logps.exp() * logps.where(x > -math.inf, 0.0)).sum(-1)
    return tokens, logps.gather(1, tokens[:, None])[:, 0], entropies


def check_samples(backend: Backend, logits: Tensor, temperature: float, greedy: bool, entropy: bool = True) -> None:
    batch, vocabulary = logits.shape
    keys = torch.tensor([noise.derive_key(i) - 2**63 for i in range(batch)])
    positions = torch.arange(batch) * 1001
    inverse = torch.tensor([1 / temperature])
    on_device = (tensor.to(backend.device) for tensor in (keys, positions, inverse))
    tokens, logps, entropies = backend.ops.sample_tokens(logits, *on_device, greedy=greedy, entropy=entropy)
    words = noise.uniform_words(keys, positions, vocabulary)
    expected = sample_exactly(logits.cpu().float() * inverse, words, greedy)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == expected[0].tolist()
    torch.testing.assert_close(logps.cpu().double(), expected[1], rtol=0, atol=1e-5)
    if entropy:
        torch.testing.assert_close(entropies.cpu().double(), expected[2], rtol=1e-5, atol=1e-5)
    else:
        assert entropies is None


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 1024, 4096, 9001])
def test_sample_tokens(backend: Backend, vocabulary: int, greedy: bool) -> None:
    logits = torch.randn(4, vocabulary + 3)[:, :vocabulary] * 4  # a stride longer than the row
    check_samples(backend, logits.to(backend.device), 0.7, greedy)


@pytest.mark.parametrize("greedy", [False, True])
def test_filtered_and_half_precision_logits(backend: Backend, greedy: bool) -> None:
    logits = torch.randn(4, 9001) * 3
    logits[0, 100:] = -math.inf  # whole chunks
    logits[1, :4096] = torch.finfo(torch.float32).min
    logits[2] = -math.inf
    logits[2, 8999] = -5.0
    check_samples(backend, logits.to(backend.device), 1.0, greedy)
    check_samples(backend, logits.clamp(min=-60000).half().to(backend.device), 1.3, greedy, entropy=False)


def test_greedy_takes_the_first_of_equals(backend: Backend) -> None:
    logits = torch.zeros(3, 9001)
    # The kernel's lanes are 1024 wide: 1023 and 1024 are far apart there, 3000 and 1976 meet in the same place.
    for row, ties in enumerate(([1024, 1023, 8000], [3000, 1976], [9000, 5000])):
        logits[row, ties] = 1.0
    check_samples(backend, logits.to(backend.device), 1.0, greedy=True)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_bad_row_is_told_and_the_others_are_not_touched(backend: Backend, greedy: bool) -> None:
    logits = torch.randn(5, 4200)
    logits[0, 4150] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    args = [logits, torch.arange(5), torch.arange(5), torch.ones(1)]
    got = backend.ops.sample_tokens(*(x.to(backend.device) for x in args), greedy=greedy, entropy=True)
    tokens, logps, entropies = (result.cpu() for result in got)
    assert tokens[:4].tolist() == [-1] * 4
    assert logps[:4].isnan().all()
    assert entropies[:4].isnan().all()
    assert 0 <= tokens[4] < 4200
    torch.testing.assert_close(logps[4], logits[4].log_softmax(0)[tokens[4]], rtol=0, atol=1e-5)


@triton.jit
def words_kernel(keys, positions, out):  # type: ignore[no-untyped-def]
    row, chunk = tl.program_id(0), tl.program_id(1)
    to = out + (row * tl.num_programs(1) + chunk) * 4096 + tl.arange(0, 1024)
    w0, w1, w2, w3 = draw_words(keys, positions, row, chunk, 1024)
    tl.store(to, w0.to(tl.int64))
    tl.store(to + 1024, w1.to(tl.int64))
    tl.store(to + 2048, w2.to(tl.int64))
    tl.store(to + 3072, w3.to(tl.int64))


def test_the_noise_is_the_same_integers_on_every_device() -> None:
    keys = torch.tensor([0, -1, 2**63 - 1, noise.derive_key(3) - 2**63], device=DEVICE)
    positions = torch.tensor([0, 1, 2**32 - 1, 777], device=DEVICE)
    out = torch.empty(4, 12288, dtype=torch.int64, device=DEVICE)
    words_kernel[(4, 3)](keys, positions, out)
    assert torch.equal(out.cpu(), noise.uniform_words(keys.cpu(), positions.cpu(), 12288))


# ---- the choice between them


def test_all_three_modules_offer_the_same_functions() -> None:
    for name in reference.__all__:
        expected = inspect.signature(getattr(reference, name))
        assert inspect.signature(getattr(ops, name)) == expected
        assert inspect.signature(getattr(kernels, name)) == expected
    assert set(ops.__all__) == {*reference.__all__, "choose_splits"}


def test_cpu_tensors_need_no_triton() -> None:
    code = (
        "import sys, torch; from gruppo.engine import ops; x = torch.ones(1, 1, 1); "
        "ops.write_kv(x, x, x.clone(), x.clone(), torch.tensor([0]))"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'gruppo.engine.kernels' not in sys.modules"], check=True)


# ---- real shapes, compiled

REAL = {
    "qwen": Case(12, 2, 128, 128, dtype=torch.bfloat16),
    "multi-head": Case(16, 16, 64, 64, dtype=torch.bfloat16),
    "phi": Case(32, 8, 96, 96, window=300, dtype=torch.bfloat16),
    "gemma": Case(8, 4, 256, 256, window=128, softcap=50.0, dtype=torch.bfloat16),
    "gpt-oss": Case(64, 8, 64, 64, window=128, sinks=True, dtype=torch.bfloat16),
    "float32": Case(14, 2, 64, 64),
}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


# Half precision rounds the weights and the result, 2⁻⁹ each at most.
BOUND = {torch.bfloat16: 4e-3, torch.float32: 5e-6}


def groups(case: Case, prompts: int, samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, pools and the context (4, B) of `samples` rows for each prompt, lengths ragged around 200 and 256."""
    prompt_len = torch.randint(100, 300, (prompts,)).repeat_interleave(samples)
    prompt_start = torch.arange(prompts).repeat_interleave(samples) * 300
    tail_len = torch.randint(1, 513, (prompts * samples,))
    tail_start = prompts * 300 + torch.arange(prompts * samples) * 513
    places = prompts * 300 + prompts * samples * 513
    query = torch.randn(prompts * samples, case.heads, case.size, device="cuda").to(case.dtype)
    pool_k = torch.randn(places, case.kv_heads, case.size, device="cuda").to(case.dtype)
    pool_v = torch.randn(places, case.kv_heads, case.size_v, device="cuda").to(case.dtype)
    return query, pool_k, pool_v, torch.stack([prompt_start, prompt_len, tail_start, tail_len]).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize(("prompts", "samples"), [(32, 16), (1, 3)])
@pytest.mark.parametrize("name", REAL)
def test_decode_attention_at_size(name: str, prompts: int, samples: int) -> None:
    case = REAL[name]
    query, pool_k, pool_v, context = groups(case, prompts, samples)
    options = case.options("cuda")
    wide_k, wide_v = pool_k.double(), pool_v.double()
    expected = torch.cat(  # in parts: the twin gathers every row's keys
        [
            reference.decode_attention(q.double(), wide_k, wide_v, *c, **options)
            for q, c in zip(query.split(16), context.split(16, 1), strict=True)
        ]
    )
    for splits, shared in ((1, False), (ops.choose_splits(len(query), case.kv_heads), False), (7, False), (1, True)):
        work = dict(splits=splits, shared=shared)
        got = ops.decode_attention(query, pool_k, pool_v, *context, **options, **work)
        assert relative_error(got, expected) < BOUND[case.dtype]
        again = ops.decode_attention(query, pool_k, pool_v, *context, **options, **work)
        assert torch.equal(got, again)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("longest", [300, 16])
def test_prefill_attention_at_size(name: str, longest: int) -> None:
    case = REAL[name]
    counts, past = torch.randint(1, longest + 1, (24,)), torch.randint(0, 400, (24,))
    counts[0], past[:6] = longest, 0
    cu_query = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().cuda()
    starts = torch.arange(24).cuda() * 700
    query = torch.randn(case.heads, int(counts.sum()), case.size, device="cuda").to(case.dtype).transpose(0, 1)
    pool_k = torch.randn(24 * 700, case.kv_heads, case.size, device="cuda").to(case.dtype)
    pool_v = torch.randn(24 * 700, case.kv_heads, case.size_v, device="cuda").to(case.dtype)
    layout, options = (starts, past.cuda(), cu_query), dict(max_query=longest, **case.options("cuda"))
    got = ops.prefill_attention(query, pool_k, pool_v, *layout, **options)
    exact = reference.prefill_attention(query.double(), pool_k.double(), pool_v.double(), *layout, **options)
    assert relative_error(got, exact) < BOUND[case.dtype]


@pytest.mark.gpu
def test_places_beyond_two_to_the_31_elements() -> None:
    places, case = 8_500_000, REAL["qwen"]
    pool_k, pool_v = (torch.zeros(places, case.kv_heads, case.size, dtype=case.dtype, device="cuda") for _ in range(2))
    assert pool_k.numel() > 2**31
    last = torch.arange(places - 200, places, device="cuda")
    keys, values = (torch.randn(200, case.kv_heads, case.size, device="cuda").to(case.dtype) for _ in range(2))
    ops.write_kv(keys, values, pool_k, pool_v, last)
    assert torch.equal(pool_k[last], keys)
    query = torch.randn(1, case.heads, case.size, device="cuda").to(case.dtype)
    options = case.options("cuda")
    context = [torch.tensor([n], device="cuda") for n in (places - 200, 150, places - 50, 50)]
    inside = [torch.tensor([n], device="cuda") for n in (0, 150, 150, 50)]
    expected = ops.decode_attention(query, keys, values, *inside, **options)
    assert torch.equal(ops.decode_attention(query, pool_k, pool_v, *context, **options), expected)
    cu_query = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    options["max_query"] = 1
    got = ops.prefill_attention(query, pool_k, pool_v, last[:1], last.new_tensor([199]), cu_query, **options)
    assert relative_error(got, expected) < BOUND[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_a_decode_step_can_be_captured(splits: int) -> None:
    case = REAL["qwen"]
    query, pool_k, pool_v, context = groups(case, 4, 4)
    projection = torch.randn(case.heads * case.size, 5000, device="cuda").to(case.dtype) / 40
    keys, inverse = torch.arange(16, device="cuda"), torch.ones(1, device="cuda")
    new = torch.randn(16, case.kv_heads, case.size, device="cuda").to(case.dtype)

    def step() -> tuple[Tensor, ...]:
        ops.write_kv(new, new, pool_k, pool_v, context[2] + context[3] - 1)
        out = ops.decode_attention(query, pool_k, pool_v, *context, **case.options("cuda"), splits=splits)
        tokens, logps, _ = ops.sample_tokens(
            out.flatten(1) @ projection, keys, context[3], inverse, greedy=False, entropy=False
        )
        return tokens, logps

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for length in (1, 100, 400):
        context[3].fill_(length)
        graph.replay()
        eager = step()
        assert torch.equal(captured[0], eager[0])
        torch.testing.assert_close(captured[1], eager[1])


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [50257, 151936, 262145])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sample_tokens_at_size(vocabulary: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(32, vocabulary, device="cuda") * 3).to(dtype)
    for greedy in (False, True):
        check_samples(Backend(ops, "cuda"), logits, 0.9, greedy)  # type: ignore[arg-type]
