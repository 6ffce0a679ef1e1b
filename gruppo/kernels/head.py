"""A language model's head without its logits: log-probs and entropies of tokens straight from the hidden states.

The logits of M tokens over a vocabulary of V are the largest tensor of a training step. Here they exist for one block
of the vocabulary at a time. The forward pass computes a block's logits as a matrix product and adds them, in one pass,
to a running softmax per token (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867). The backward pass
recomputes the block's logits and turns them into their gradient. The vocabulary is divided, not the tokens, so that
the gradient of a weight row is one product over all tokens, summed in float32 and written once.

Between the products, Triton kernels run on CUDA (`gruppo.kernels.gpu.head`); elsewhere, and in float64, plain torch.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Head", "head_scores"]

# Maximum number of logits in a block: 256 MiB of float32 on a GPU, what fits a large cache on a CPU.
_LOGITS_ON_CUDA = 64 * 2**20
_LOGITS_ON_CPU = 2**20
_FEWEST_COLUMNS = 1024  # below that the products are inefficient
_COLUMNS_ALIGNED = 128  # aligns the rows of a block, so that a GPU can read 16 bytes at once
_FLOOR = -1e4  # e to this is 0 in any dtype, and so is 0 times this; 0 times -inf would be NaN


@dataclass(frozen=True)
class Head:
    """The last layer of a language model: hidden states (M, H) to logits cap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0  # Cohere multiplies its logits; Granite divides them, 1 / x
    softcap: float | None = None  # cap(z) = c * tanh(z / c), as in Gemma


def head_scores(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at `targets`, and the entropy of that softmax on request, (M,) each.

    Hidden states are (M, H), targets int64 (M,); a target outside the vocabulary gives NaN. Matrix products are
    computed in `dtype`, for example the autocast dtype; None means the promoted dtype of hidden states and weight.
    As under autocast, float64 stays float64. The results are float32, or float64 for float64 inputs. The entropy takes
    part in the backward pass only with `entropy_gradient`. Tokens whose incoming gradient is 0 add nothing to any
    gradient, not even a NaN.
    """
    _check(hidden, head, targets, temperature)
    if entropy_gradient and not entropy:
        raise ValueError("entropy_gradient=True needs entropy=True")
    common = torch.promote_types(hidden.dtype, head.weight.dtype)
    settings = _Settings(
        product=common if dtype is None or common is torch.float64 else dtype,
        on_cuda=hidden.is_cuda,
        curve=_curve(head, temperature),
        entropy=entropy,
        entropy_gradient=entropy_gradient,
    )
    return cast(
        tuple[Tensor, Tensor | None], _HeadScores.apply(hidden, head.weight, head.bias, targets.contiguous(), settings)
    )


def _check(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if head.softcap is not None and head.softcap <= 0:
        raise ValueError(f"softcap must be positive or None, not {head.softcap}")
    fits = hidden.ndim == head.weight.ndim == 2 and hidden.shape[1] == head.weight.shape[1]
    fits = fits and (head.bias is None or head.bias.shape == head.weight.shape[:1])
    if not fits or targets.shape != hidden.shape[:1]:
        shapes = [None if x is None else tuple(x.shape) for x in (hidden, head.weight, head.bias, targets)]
        raise ValueError(f"hidden, weight, bias and targets must be (M, H), (V, H), (V,) or None, (M,), not {shapes}")


class Curve(NamedTuple):
    """From x, a product with its bias, to z = logit / temperature: inner * x, or outer * tanh(inner * x)."""

    inner: float
    outer: float | None


def _curve(head: Head, temperature: float) -> Curve:
    if head.softcap is None:
        return Curve(head.scale / temperature, None)
    return Curve(head.scale / head.softcap, head.softcap / temperature)


class _Settings(NamedTuple):
    product: torch.dtype
    on_cuda: bool
    curve: Curve
    entropy: bool
    entropy_gradient: bool

    @property
    def wide(self) -> torch.dtype:
        """The dtype of logits, sums and results."""
        return torch.promote_types(self.product, torch.float32)

    @property
    def work(self) -> torch.dtype:
        """The dtype of a product's operands. A CPU rounds half-precision sums midway, so they are widened there."""
        return self.product if self.on_cuda else self.wide

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.product).to(self.work)

    @property
    def home(self) -> Any:
        """The module or class that implements `take_in` and `differentiate`."""
        if not self.on_cuda or self.wide is torch.float64:  # the kernels compute in float32
            return _Plain
        from gruppo.kernels.gpu import head

        return head


class Running(NamedTuple):
    """The softmax of the blocks so far, per token (M,), with z = logit / temperature."""

    highest: Tensor  # the largest z
    total: Tensor  # the sum of e^(z - highest)
    moment: Tensor | None  # the sum of e^(z - highest) (z - highest); only the entropy needs it
    picked: Tensor  # the target's z; NaN until its block is processed


class Incoming(NamedTuple):
    """Inputs of the backward pass per token, (M,): its target, its softmax and the gradients of its results."""

    targets: Tensor
    logsumexp: Tensor
    by_logp: Tensor
    entropy: Tensor | None  # None, like by_entropy, if the entropy has no gradient
    by_entropy: Tensor | None

    def absent(self) -> Tensor:
        """The tokens whose gradients are all 0: bool (M,)."""
        absent = self.by_logp == 0
        return absent if self.by_entropy is None else absent & (self.by_entropy == 0)


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor | None]:
        with _undisturbed(hidden):
            running = _start(hidden, settings)
            for block in _blocks(settings.operand(hidden), weight, bias, settings):
                settings.home.take_in(block.products, block.bias, targets, block.first, settings.curve, running)
            log_total = running.total.log()
            # The maximum is subtracted first: adding a small logarithm to a large maximum would lose digits.
            logps = (running.picked - running.highest).sub_(log_total)
            entropies = None if running.moment is None else log_total - running.moment / running.total
            logsumexp = running.highest + log_total
        kept = entropies if settings.entropy_gradient else None
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, kept)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        if entropies is not None and not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, targets, logsumexp, entropies = ctx.saved_tensors
        by_logp, by_entropy = grads
        if by_logp is None:
            by_logp = torch.zeros_like(logsumexp)
        if not ctx.settings.entropy_gradient or by_entropy is None:
            entropies = by_entropy = None
        else:
            by_entropy = by_entropy.contiguous()
        incoming = Incoming(targets, logsumexp, by_logp.contiguous(), entropies, by_entropy)
        with _undisturbed(hidden):
            found = _gradients(hidden, weight, bias, incoming, ctx.settings, ctx.needs_input_grad[:3])
        return *found, None, None


def _start(hidden: Tensor, settings: _Settings) -> Running:
    highest = hidden.new_full(hidden.shape[:1], -torch.inf, dtype=settings.wide)
    moment = torch.zeros_like(highest) if settings.entropy else None
    return Running(highest, torch.zeros_like(highest), moment, torch.full_like(highest, torch.nan))


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    incoming: Incoming,
    settings: _Settings,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden states, weight and bias, each in its dtype, or None if not needed."""
    room = torch.empty_like if len(hidden) else torch.zeros_like  # without tokens there are no blocks that fill it
    d_hidden = room(hidden, dtype=settings.wide) if needed[0] else None
    d_weight = room(weight) if needed[1] else None
    d_bias = None if bias is None or not needed[2] else room(bias)
    operand = settings.operand(hidden)
    # An absent token's row of the gradient is 0, but 0 times a NaN in its hidden state would be NaN.
    tokens = operand.masked_fill(incoming.absent()[:, None], 0.0) if needed[1] else None
    narrow: Tensor | None = None
    for block in _blocks(operand, weight, bias, settings):
        into, rows = block.products, slice(block.first, block.first + len(block.weight))
        if settings.work is not settings.wide:
            narrow = torch.empty_like(block.buffer, dtype=settings.work) if narrow is None else narrow
            into = narrow[:, : len(block.weight)]
        settings.home.differentiate(block.products, block.bias, block.first, settings.curve, incoming, into)
        if d_weight is not None and tokens is not None:
            _multiply(into.T, tokens, d_weight[rows])
        if d_hidden is not None:
            _multiply(into, block.weight, d_hidden, add=block.first > 0)
        if d_bias is not None:
            d_bias[rows] = into.sum(0, dtype=settings.wide)
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias


class _Block(NamedTuple):
    first: int  # the vocabulary index of the first column
    products: Tensor  # (M, W): hidden @ weight.T, without the bias
    weight: Tensor  # (W, H), as an operand
    bias: Tensor | None  # (W,)
    buffer: Tensor  # (M, at least W), the memory of the products


def _blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Iterator[_Block]:
    """The products of the head with hidden states (an operand), block by block; each overwrites the previous one."""
    vocabulary, tokens = len(weight), len(hidden)
    columns = block_columns(tokens, vocabulary, settings.on_cuda)
    buffer = hidden.new_empty(tokens, columns, dtype=settings.wide)
    for first in range(0, vocabulary if tokens else 0, columns):
        rows = slice(first, min(first + columns, vocabulary))
        operand = settings.operand(weight[rows])
        products = buffer[:, : len(operand)]
        _multiply(hidden, operand.T, products)
        yield _Block(first, products, operand, None if bias is None else bias[rows].contiguous(), buffer)


def block_columns(tokens: int, vocabulary: int, on_cuda: bool) -> int:
    """Columns per block: within the budget, and spread evenly so that the last block is not much smaller."""
    budget = (_LOGITS_ON_CUDA if on_cuda else _LOGITS_ON_CPU) // max(tokens, 1)
    most = max(budget // _COLUMNS_ALIGNED * _COLUMNS_ALIGNED, _FEWEST_COLUMNS)
    blocks = max(-(-vocabulary // most), 1)
    even = -(-vocabulary // blocks)
    return -(-even // _COLUMNS_ALIGNED) * _COLUMNS_ALIGNED


@contextmanager
def _undisturbed(tensor: Tensor) -> Iterator[None]:
    """Disable autocast, which would change dtypes, and select the tensor's device, on which Triton launches."""
    with torch.autocast(tensor.device.type, enabled=False), torch.cuda.device_of(tensor):
        yield


def _multiply(a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None:
    """`into` = a @ b, or += with `add`; if possible rounded only once, to the dtype of `into`."""
    if a.dtype == into.dtype:
        if add:
            into.addmm_(a, b)
        else:
            torch.mm(a, b, out=into)
        return
    widens, adds_wide = _widening(a.device, a.dtype, into.dtype)
    if adds_wide and add:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    elif widens and not add:
        torch.mm(a, b, out_dtype=into.dtype, out=into)
    else:
        product = torch.mm(a, b, out_dtype=into.dtype) if widens else torch.mm(a, b)
        if add:
            into.add_(product)
        else:
            into.copy_(product)


@functools.cache
def _widening(device: torch.device, dtype: torch.dtype, wide: torch.dtype) -> tuple[bool, bool]:
    """Whether mm, and addmm, can return sums of `dtype` products in the wider dtype, unrounded; found by trying.

    Some versions of addmm require the added tensor to have the dtype of the operands.
    """
    works = []
    a, into = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device, dtype=wide)
    for attempt in (
        lambda: torch.mm(a, a, out_dtype=wide, out=into),
        lambda: torch.addmm(into, a, a, out_dtype=wide, out=into),
    ):
        try:
            works.append(attempt() is into)
        except (RuntimeError, TypeError):
            works.append(False)
    return works[0], works[1]


class _Plain:
    """What happens to a block between the products, in torch. Both functions overwrite the products."""

    @staticmethod
    def take_in(
        products: Tensor, bias: Tensor | None, targets: Tensor, first: int, curve: Curve, running: Running
    ) -> None:
        """Add a block to the running softmax: products (M, W) of the vocabulary entries starting at `first`."""
        z, _ = _bend(products, bias, curve)
        place, inside = _places(targets, first, z.shape[1])
        running.picked.copy_(torch.where(inside, z.gather(1, place)[:, 0], running.picked))
        higher = torch.maximum(running.highest, z.amax(1))
        anchor = higher.masked_fill(higher == -torch.inf, 0.0)  # only -inf so far: -inf - -inf is NaN
        moved = (running.highest - anchor).clamp_(min=_FLOOR)
        fade = moved.exp()
        below = z.sub_(anchor[:, None])
        if running.moment is None:
            mass = below.exp_()
        else:
            mass = below.clamp_(min=_FLOOR).exp()
            running.moment.add_(moved * running.total).mul_(fade).add_(below.mul_(mass).sum(1))
        running.total.mul_(fade).add_(mass.sum(1))
        running.highest.copy_(higher)

    @staticmethod
    def differentiate(
        products: Tensor, bias: Tensor | None, first: int, curve: Curve, incoming: Incoming, into: Tensor
    ) -> None:
        """Write the gradient of a block's products (M, W), as in `take_in`, to `into`, which may be `products`."""
        z, slope = _bend(products, bias, curve)
        place, inside = _places(incoming.targets, first, z.shape[1])
        log_p = z.sub_(incoming.logsumexp[:, None])
        by_logp = incoming.by_logp[:, None]
        if incoming.by_entropy is None or incoming.entropy is None:
            grad = log_p.exp_().mul_(-by_logp)
        else:
            p = log_p.clamp_(min=_FLOOR).exp()
            surplus = log_p.add_(incoming.entropy[:, None]).mul_(incoming.by_entropy[:, None])
            grad = surplus.add_(by_logp).mul_(p).neg_()
        grad.scatter_add_(1, place, torch.where(inside[:, None], by_logp, 0.0)).mul_(slope)
        into.copy_(grad.masked_fill_(incoming.absent()[:, None], 0.0))


def _bend(products: Tensor, bias: Tensor | None, curve: Curve) -> tuple[Tensor, Tensor | float]:
    """z = logit / temperature of a block, computed in place, and its derivative with respect to the products."""
    x = products if bias is None else products.add_(bias)
    x.mul_(curve.inner)
    if curve.outer is None:
        return x, curve.inner
    bounded = x.tanh_()
    slope = bounded.square().neg_().add_(1.0).mul_(curve.inner * curve.outer)
    return bounded.mul_(curve.outer), slope


def _places(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """The columns of the targets in a block (M, 1), arbitrary if outside, and whether they are inside (M,)."""
    place = targets - first
    return place.clamp(0, columns - 1)[:, None], (place >= 0) & (place < columns)
