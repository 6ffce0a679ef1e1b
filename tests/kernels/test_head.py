"""The head without its logits, against log_softmax of all logits and autograd, most of it in float64.

Without a GPU the Triton kernels run in Triton's interpreter, called directly and under the whole function.
"""

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gruppo.kernels import head as module
from gruppo.kernels.gpu import head as kernels
from gruppo.kernels.head import Curve, Head, Incoming, Running, head_scores
from tests import interpreter

interpreter.make_ready()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 2**28  # bytes of logits in a block on CUDA

# The interpreter computes NaN and -inf, on purpose, in numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*", "ignore::RuntimeWarning:numpy.*")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What torch.empty returns is full of NaN: an element nobody writes shows."""
    torch.set_deterministic_debug_mode("warn")
    torch.manual_seed(0)
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 columns, so that a vocabulary of a few hundred is several blocks."""
    monkeypatch.setattr(module, "_FEWEST_COLUMNS", 128)
    monkeypatch.setattr(module, "_LOGITS_ON_CPU", 128)
    monkeypatch.setattr(module, "_LOGITS_ON_CUDA", 128)


@pytest.fixture(params=["torch", "triton"])
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both implementations of what happens between the products, under the same function."""
    chosen = module._Plain if request.param == "torch" else kernels
    monkeypatch.setattr(module._Settings, "home", property(lambda self: chosen))
    return chosen


class Given(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    def leaves(self, dtype: torch.dtype | None = None, frozen: bool = False) -> "Given":
        """Copies of their own, in a type, that gather gradients; all but the weight and bias, if frozen."""
        copies = [None if x is None else x.detach().clone().to(dtype or x.dtype) for x in self[:3]]
        for place, copy in enumerate(copies):
            if copy is not None:
                copy.requires_grad_(place == 0 or not frozen)
        return Given(*copies, self.targets)  # type: ignore[arg-type]

    def head(self, scale: float = 1.0, softcap: float | None = None) -> Head:
        return Head(self.weight, self.bias, scale, softcap)


def given(tokens: int, vocabulary: int, bias: bool = True, size: int = 16, device: str = DEVICE) -> Given:
    """In float64. Spread enough for probabilities between 0.9 and nothing."""
    hidden, weight = torch.randn(tokens, size).double(), torch.randn(vocabulary, size).double()
    values = torch.randn(vocabulary).double() if bias else None
    targets = torch.randint(vocabulary, (tokens,))
    return Given(*(None if x is None else x.to(device) for x in (hidden, weight, values, targets)))  # type: ignore


def plainly(given: Given, scale: float, softcap: float | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from all logits, by autograd's own operations, in the type of what is given."""
    z = (given.hidden @ given.weight.T) if given.bias is None else (given.hidden @ given.weight.T + given.bias)
    z = z * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)
    return log_p.gather(1, given.targets[:, None])[:, 0], entropy


def mixed(logps: Tensor, entropies: Tensor | None) -> Tensor:
    """A loss in which every token counts differently, and with another factor for its entropy."""
    factors = torch.linspace(-1, 2, len(logps), device=logps.device, dtype=logps.dtype)
    loss = (logps * factors).sum()
    return loss if entropies is None else loss + (entropies * factors.flip(0)).sum() * 0.3


def grads(given: Given) -> list[Tensor | None]:
    return [None if x is None else x.grad for x in given[:3]]


def assert_near(got: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest entry: a sum of many terms is no better than its terms."""
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            atol = tolerance * max(other.abs().max().item(), 1.0) if other.numel() else 0.0
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=atol)


# ---- values and gradients


def test_three_words_by_hand() -> None:
    """Logits 0, log 2, log 5 over temperature 1: probabilities 1/8, 2/8, 5/8."""
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(
        [[0.0, 0.0], [math.log(2), 0.0], [0.0, math.log(5)]], dtype=torch.float64, requires_grad=True
    )
    logps, entropies = head_scores(hidden, Head(weight), torch.tensor([1]), entropy=True)
    assert logps.item() == pytest.approx(math.log(2 / 8), abs=1e-15)
    assert entropies is not None
    assert entropies.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)), abs=1e-15)
    logps.sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([-1 / 8, 6 / 8, -5 / 8], abs=1e-15)
    assert hidden.grad.tolist()[0] == pytest.approx([6 / 8 * math.log(2), -5 / 8 * math.log(5)], abs=1e-15)


OPTIONS = list(itertools.product([False, True], [1.0, 0.4], [None, 3.0], [1.0, 0.7], ["none", "value", "gradient"]))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("bias", "scale", "softcap", "temperature", "entropy"), OPTIONS)
def test_float64_against_all_logits(
    bias: bool, scale: float, softcap: float | None, temperature: float, entropy: str, frozen: bool
) -> None:
    one = given(7, 300, bias).leaves(frozen=frozen)
    other = one.leaves(frozen=frozen)
    options = dict(temperature=temperature, entropy=entropy != "none", entropy_gradient=entropy == "gradient")
    logps, entropies = head_scores(one.hidden, one.head(scale, softcap), one.targets, **options)
    expected, expected_entropies = plainly(other, scale, softcap, temperature)
    assert logps.dtype == torch.float64
    assert_near([logps], [expected], 1e-12)
    assert (entropies is None) == (entropy == "none")
    if entropies is not None:
        assert entropies.requires_grad == (entropy == "gradient")
        assert_near([entropies], [expected_entropies], 1e-12)
    mixed(logps, entropies if entropy == "gradient" else None).backward()
    mixed(expected, expected_entropies if entropy == "gradient" else None).backward()
    assert_near(grads(one), grads(other), 1e-12)


CASES = {
    "plain": (False, 1.0, None, 1.0),
    "bias, scale, temperature": (True, 0.4, None, 0.7),
    "capped": (False, 1.0, 3.0, 1.0),
    "all at once": (True, -0.4, 3.0, 1.3),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_float32_with_either_implementation(home: Any, name: str, entropy: bool) -> None:
    bias, *curve = CASES[name]
    source = given(5, 300, bias)
    one, other = source.leaves(torch.float32), source.leaves()
    logps, entropies = head_scores(
        one.hidden,
        one.head(*curve[:2]),
        one.targets,
        temperature=curve[2],
        entropy=entropy,
        entropy_gradient=entropy,
    )
    expected, expected_entropies = plainly(other, *curve)
    assert logps.dtype == torch.float32
    assert_near([logps, entropies], [expected, expected_entropies if entropy else None], 1e-5)
    mixed(logps, entropies).backward()
    mixed(expected, expected_entropies if entropy else None).backward()
    assert all(x is None or x.dtype == torch.float32 for x in grads(one))
    assert_near(grads(one), grads(other), 1e-5)


def test_only_the_entropy_has_a_gradient(home: Any) -> None:
    source = given(4, 50)
    one, other = source.leaves(torch.float32), source.leaves()
    _, entropies = head_scores(one.hidden, one.head(), one.targets, entropy=True, entropy_gradient=True)
    assert entropies is not None
    entropies.sum().backward()
    plainly(other, 1.0, None, 1.0)[1].sum().backward()
    assert_near(grads(one), grads(other), 1e-5)


@pytest.mark.parametrize("learning", ["weight", "bias"])
def test_only_what_learns_has_a_gradient(home: Any, learning: str) -> None:
    source = given(4, 50)
    one, other = source._replace(hidden=source.hidden.float(), weight=source.weight.float()), source.leaves()
    getattr(one, learning).requires_grad_()
    head_scores(one.hidden, one.head(), one.targets)[0].sum().backward()  # the sum's gradient is an expanded scalar
    plainly(other, 1.0, None, 1.0)[0].sum().backward()
    assert_near([getattr(one, learning).grad], [getattr(other, learning).grad], 1e-5)
    assert sum(x is not None for x in grads(one)) == 1


@pytest.mark.parametrize(("tokens", "vocabulary"), [(0, 50), (1, 50), (3, 1), (2, 1025)])
def test_few_tokens_and_words(tokens: int, vocabulary: int) -> None:
    one = given(tokens, vocabulary).leaves()
    other = one.leaves()
    logps, entropies = head_scores(one.hidden, one.head(), one.targets, entropy=True, entropy_gradient=True)
    expected = plainly(other, 1.0, None, 1.0)
    assert logps.shape == (tokens,)
    assert_near([logps, entropies], expected, 1e-12)
    mixed(logps, entropies).backward()
    mixed(*expected).backward()
    assert all(x is not None for x in grads(one))
    assert_near(grads(one), grads(other), 1e-12)


def test_large_logits_lose_no_digits(home: Any) -> None:
    """Log-prob and entropy are differences of logits: with exact ones around 1024 they are good to their own size."""
    source = given(8, 300)
    assert source.bias is not None
    source = Given(*((x * 16).round() / 16 for x in source[:3] if x is not None), source.targets)
    source = source._replace(hidden=source.hidden.sign(), bias=source.bias + 1024)  # type: ignore[operator]
    narrow = source.leaves(torch.float32)
    got = head_scores(narrow.hidden, narrow.head(), narrow.targets, entropy=True)
    for ours, truth in zip(got, plainly(source, 1.0, None, 1.0), strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=5e-6)


def test_targets_and_bias_with_strides(home: Any) -> None:
    source = given(4, 300).leaves(torch.float32)
    assert source.bias is not None
    targets = torch.stack([source.targets, source.targets * 0], 1)[:, 0]
    bias = torch.stack([source.bias, source.bias * 0], 1)[:, 0]
    expected, _ = head_scores(source.hidden, source.head(), source.targets)
    got, _ = head_scores(source.hidden, Head(source.weight, bias), targets)
    assert torch.equal(got, expected)
    assert not torch.equal(got, head_scores(source.hidden, Head(source.weight), targets)[0])


# ---- bad numbers


@pytest.mark.usefixtures("small_blocks")
def test_forbidden_tokens(home: Any) -> None:
    """-inf in the bias, for more than a block: no mass, no NaN, no gradient. The lowest float does the same."""
    source = given(6, 300)
    assert source.bias is not None
    source.bias[:130] = -math.inf
    source.targets.copy_(torch.tensor([130, 131, 200, 299, 255, 256]))
    lowest = source._replace(bias=source.bias.clamp(min=torch.finfo(torch.float32).min))
    one, other, third = source.leaves(torch.float32), source.leaves(), lowest.leaves(torch.float32)
    for case, target in ((one, other), (third, other.leaves())):
        got = head_scores(case.hidden, case.head(), case.targets, entropy=True, entropy_gradient=True)
        expected = plainly(target, 1.0, None, 1.0)
        assert_near(got, expected, 1e-5)
        mixed(*got).backward()
        mixed(*expected).backward()
        assert target.bias is not None
        assert target.bias.grad is not None
        assert_near(grads(case), grads(target), 1e-5)
        assert (case.weight.grad[:130] == 0).all()  # type: ignore[index]


@pytest.mark.usefixtures("small_blocks")
def test_a_target_that_is_forbidden_or_does_not_exist(home: Any) -> None:
    source = given(3, 200).leaves(torch.float32)
    with torch.no_grad():
        source.bias[5] = -math.inf  # type: ignore[index]
    logps, entropies = head_scores(
        source.hidden, source.head(), torch.tensor([5, 200, -100], device=DEVICE), entropy=True
    )
    assert logps[0] == -math.inf
    assert logps[1:].isnan().all()
    assert entropies is not None
    assert entropies.isfinite().all()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_bad_row_without_gradient_disturbs_nobody(home: Any, bad: float, entropy: bool) -> None:
    source = given(5, 300)
    rows = torch.tensor([0, 1, 3, 4], device=DEVICE)
    one, other = (
        source.leaves(torch.float32),
        source._replace(hidden=source.hidden[rows], targets=source.targets[rows]).leaves(),
    )
    with torch.no_grad():
        one.hidden[2, 3] = bad
    got = head_scores(one.hidden, one.head(), one.targets, entropy=entropy, entropy_gradient=entropy)
    assert got[0][2].isnan()
    expected = plainly(other, 1.0, None, 1.0)
    mixed(got[0][rows], got[1][rows] if got[1] is not None else None).backward()
    mixed(expected[0], expected[1] if entropy else None).backward()
    assert one.hidden.grad is not None
    assert (one.hidden.grad[2] == 0).all()
    assert_near([one.hidden.grad[rows], *grads(one)[1:]], grads(other), 1e-5)


def test_a_row_of_nothing_is_nan(home: Any) -> None:
    source = given(2, 9).leaves(torch.float32)
    head = Head(source.weight, torch.full((9,), -math.inf, device=DEVICE))
    logps, entropies = head_scores(source.hidden, head, source.targets, entropy=True)
    assert logps.isnan().all()
    assert entropies is not None
    assert entropies.isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(temperature=0.0), "temperature"),
        (dict(entropy_gradient=True), "entropy=True"),
        (dict(head=Head(torch.ones(5, 4), softcap=0.0)), "softcap"),
        (dict(head=Head(torch.ones(5, 3))), r"\(5, 3\)"),
        (dict(head=Head(torch.ones(5, 4), torch.ones(4))), r"\(4,\)"),
        (dict(targets=torch.ones(3, dtype=torch.int64)), r"\(3,\)"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = dict(hidden=torch.ones(2, 4), head=Head(torch.ones(5, 4)), targets=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        head_scores(**arguments | changes)


# ---- the kernels themselves


def block(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Products that lie in wider rows, whose other columns are NaN, and a bias."""
    rows = torch.full((tokens, width + 27), math.nan, device=DEVICE)
    rows[:, :width] = torch.randn(tokens, width) * 3
    return rows[:, :width], torch.randn(width, device=DEVICE)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("curve", [Curve(0.8, None), Curve(0.5, 4.0)])
def test_taking_in_a_block(curve: Curve, entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_TAKEN", 64)  # several steps in a row
    products, bias = block(4, 150)
    targets = torch.tensor([1000, 1149, 999, 1150], device=DEVICE)
    highest = torch.tensor([-math.inf, 0.5, 50.0, -200.0], device=DEVICE)
    total = torch.tensor([0.0, 2.0, 3.0, 4.0], device=DEVICE)
    results = []
    for home in (kernels, module._Plain):
        moment = -total if entropy else None
        running = Running(highest.clone(), total.clone(), moment, torch.full_like(highest, -7.0))
        home.take_in(products.clone(), bias, targets, 1000, curve, running)
        results.append(running)
    assert_near(*results, 1e-5)
    assert (results[0].picked[2:] == -7).all()  # in other blocks


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("curve", [Curve(0.8, None), Curve(0.5, 4.0)])
@pytest.mark.parametrize(
    "dtype", [None, torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_differentiating_a_block(curve: Curve, entropy: bool, dtype: torch.dtype | None) -> None:
    products, bias = block(4, 150)
    row = torch.arange(4.0, device=DEVICE)
    incoming = Incoming(
        torch.tensor([1000, 1149, 999, 1150], device=DEVICE),
        9 + row,
        torch.tensor([0.0, 1.0, 0.0, -2.0], device=DEVICE),
        3 - row if entropy else None,
        torch.tensor([0.0, 0.3, -0.5, 0.0], device=DEVICE) if entropy else None,
    )
    expected, rows = products.clone(), torch.full((5, 200), 77.0, device=DEVICE, dtype=dtype or torch.float32)
    module._Plain.differentiate(expected, bias, 1000, curve, incoming, expected)
    into = products if dtype is None else rows[:4, :150]  # None: in the place of the products
    kernels.differentiate(products, bias, 1000, curve, incoming, into)
    bound = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(into.dtype, 1e-6)
    torch.testing.assert_close(into.float(), expected, rtol=bound, atol=bound / 100)
    assert (into[0] == 0).all()
    assert (into[3] != 0).any()
    assert (rows[4] == 77).all()


# ---- memory, types, company


def test_a_block_keeps_to_its_budget() -> None:
    for tokens, vocabulary, on_cuda in itertools.product(
        (0, 1, 511, 4096, 70000), (1, 1024, 50257, 151936), (False, True)
    ):
        columns = module.block_columns(tokens, vocabulary, on_cuda)
        budget = 2**26 if on_cuda else module._LOGITS_ON_CPU
        assert columns % 128 == 0
        assert columns * tokens <= budget or columns <= 1024
        assert columns < vocabulary + 128
    assert module.block_columns(4096, 151936, True) == 15232  # ten blocks, of which the last is hardly smaller
    assert module.block_columns(70000, 151936, True) == 1024


def test_no_tensor_of_the_size_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    one, sizes, saved = given(48, 3000, size=8, device="cpu").leaves(), [], []
    multiply = module._multiply

    def watched(a: Tensor, b: Tensor, into: Tensor, **options: Any) -> None:
        sizes.append(tuple(into.shape))
        multiply(a, b, into, **options)

    monkeypatch.setattr(module, "_multiply", watched)
    monkeypatch.setattr(module, "_LOGITS_ON_CPU", 48 * 1100)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):  # type: ignore[func-returns-value]
        logps, entropies = head_scores(one.hidden, one.head(), one.targets, entropy=True, entropy_gradient=True)
    assert set(saved) == {(48, 8), (3000, 8), (3000,), (48,)}
    blocks = [(48, 1024), (48, 1024), (48, 952)]
    assert sizes == blocks
    mixed(logps, entropies).backward()
    assert [size for size in sizes if size[1] != 8] == blocks * 2
    assert {size for size in sizes if size[1] == 8} == {(1024, 8), (952, 8), (48, 8)}


def test_the_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for fewest in (128, 256, 1024):
        monkeypatch.setattr(module, "_FEWEST_COLUMNS", fewest)
        monkeypatch.setattr(module, "_LOGITS_ON_CPU", 1)
        torch.manual_seed(1)
        one = given(6, 700, device="cpu").leaves()
        scores = head_scores(one.hidden, one.head(), one.targets, entropy=True, entropy_gradient=True)
        mixed(*scores).backward()
        results.append([*scores, *grads(one)])
    assert_near(results[0], results[2], 1e-13)
    assert_near(results[1], results[2], 1e-13)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast_outside_changes_nothing(weight_dtype: torch.dtype) -> None:
    results = []
    for active in (False, True):
        torch.manual_seed(1)
        one = given(6, 300).leaves(torch.float32)
        one = one._replace(weight=one.weight.detach().to(weight_dtype).requires_grad_())
        with torch.autocast(DEVICE, torch.bfloat16, enabled=active):
            scores = head_scores(one.hidden, one.head(), one.targets, entropy=True, entropy_gradient=True)
            mixed(*scores).backward()
        results.append([*scores, *grads(one)])
    assert [x.dtype for x in results[1]] == [*[torch.float32] * 3, weight_dtype, torch.float32]
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_products_in_a_given_type() -> None:
    """Operands are rounded to it, and nothing else; gradients are in the type of what they belong to."""
    source = given(6, 300, device="cpu")
    one = source.leaves(torch.float32)
    logps, _ = head_scores(one.hidden, one.head(), one.targets, dtype=torch.bfloat16)
    rounded = source._replace(hidden=source.hidden.bfloat16().double(), weight=source.weight.bfloat16().double())
    other = rounded.leaves()
    expected, _ = plainly(other, 1.0, None, 1.0)
    assert_near([logps], [expected], 1e-5)
    assert not torch.allclose(logps.double(), plainly(source, 1.0, None, 1.0)[0], rtol=0, atol=1e-4)
    mixed(logps, None).backward()
    mixed(expected, None).backward()
    assert all(x is not None and x.dtype == torch.float32 for x in grads(one))
    assert_near(grads(one), grads(other), 1e-5)
    double = head_scores(source.hidden, source.head(), source.targets, dtype=torch.bfloat16)[0]
    assert_near([double], [plainly(source, 1.0, None, 1.0)[0]], 1e-12)


def test_bfloat16_on_a_cpu_is_no_worse_than_bfloat16_logits() -> None:
    source = given(32, 500, size=64, device="cpu").leaves(torch.bfloat16)
    exact, one, plain = source.leaves(torch.float64), source.leaves(), source.leaves()
    expected = plainly(exact, 0.3, None, 1.0)
    got = head_scores(one.hidden, one.head(0.3), one.targets, entropy=True, entropy_gradient=True)
    usual = plainly(plain, 0.3, None, 1.0)
    for scores in (expected, got, usual):
        mixed(*scores).backward()
    assert got[0].dtype == torch.float32
    rows = zip([*got, *grads(one)], [*usual, *grads(plain)], [*expected, *grads(exact)], strict=True)
    for ours, theirs, truth in rows:
        assert (ours.double() - truth).norm() <= (theirs.double() - truth).norm()
    assert all(x is not None and x.dtype == torch.bfloat16 for x in grads(one))


def test_mixed_types_of_hidden_and_weight() -> None:
    source = given(5, 200, device="cpu")
    hidden, weight = source.hidden.bfloat16().requires_grad_(), source.weight.float().requires_grad_()
    for one, other in (
        (hidden, weight),
        (hidden.detach().float().requires_grad_(), weight.detach().bfloat16().requires_grad_()),
    ):
        head_scores(one, Head(other), source.targets)[0].sum().backward()
        exact = Given(one.detach(), other.detach(), None, source.targets).leaves(torch.float64)
        plainly(exact, 1.0, None, 1.0)[0].sum().backward()
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad.dtype, other.grad.dtype) == (one.dtype, other.dtype)
        assert_near([one.grad, other.grad], [exact.hidden.grad, exact.weight.grad], 4e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_without_gradients(reentrant: bool) -> None:
    source = given(6, 300)
    one, other = source.leaves(), source.leaves()

    def scores(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return head_scores(hidden * 2, one.head(), one.targets, entropy=True, entropy_gradient=True)

    got = checkpoint(scores, one.hidden, use_reentrant=reentrant)
    expected = head_scores(other.hidden * 2, other.head(), other.targets, entropy=True, entropy_gradient=True)
    mixed(*got).backward()
    mixed(*expected).backward()
    for a, b in zip([*got, *grads(one)], [*expected, *grads(other)], strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        plain = scores(one.hidden)
    assert not plain[0].requires_grad
    assert torch.equal(plain[0], got[0])


def test_cpu_tensors_need_no_triton() -> None:
    code = (
        "import sys, torch; from gruppo.kernels.head import Head, head_scores; "
        "x = torch.ones(2, 3, requires_grad=True); "
        "head_scores(x, Head(torch.ones(4, 3)), torch.tensor([0, 1]))[0].sum().backward(); "
        "assert x.grad is not None and 'gruppo.kernels.gpu.head' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- a real shape, compiled


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_a_real_head_in_bfloat16(weight_dtype: torch.dtype) -> None:
    tokens, size, vocabulary = 4096, 1536, 151936
    hidden = torch.randn(tokens, size, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, size, device="cuda") * 0.05).bfloat16().to(weight_dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = head_scores(
        hidden, Head(weight), targets, temperature=0.9, entropy=True, entropy_gradient=True, dtype=torch.bfloat16
    )
    mixed(*got).backward()
    rise = torch.cuda.max_memory_allocated() - before
    assert rise < 3 * BUDGET + weight.numel() * weight.element_size() + 2**27

    some = torch.arange(0, tokens, 97, device="cuda")
    exact = Given(hidden.detach()[some].double(), weight.detach().double(), None, targets[some])
    assert_near([x[some] for x in got if x is not None], plainly(exact, 1.0, None, 0.9), 2e-5)
    del exact
    wide = Given(hidden, weight, None, targets).leaves(torch.float32)
    mixed(*plainly(wide, 1.0, None, 0.9)).backward()
    # The gradient of the logits is rounded, and the results are: 2⁻⁹ each at most, mostly to either side.
    for ours, truth, dtype in zip((hidden, weight), wide[:2], (torch.bfloat16, weight_dtype), strict=True):
        assert ours.grad is not None
        assert truth is not None
        assert truth.grad is not None
        assert ours.grad.dtype == dtype
        assert ((ours.grad.float() - truth.grad).norm() / truth.grad.norm()).item() < 4e-3
