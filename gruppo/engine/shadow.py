"""Float32 master weights under bfloat16 autocast: one bfloat16 copy of what autocast would cast at every step.

The trainer's forward pass casts the weights of linear layers once per pass, which costs little beside a batch of whole
sequences. Decoding is one pass per token, and the casts would dominate it. So the engine keeps the cast weights and
refreshes them when a rollout begins. The arithmetic is the same as the trainer's: norms, embeddings and the residual
stream stay in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gruppo.policy.inplace import Swap


class Shadow:
    """Copies of linear weights and biases in the autocast dtype; a tied weight has one copy."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        # A layer whose forward was replaced (by a hand-written adapter, say) is left to autocast.
        plain = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
        self.linears = [m for m in plain if m.weight.dtype is torch.float32]
        self._originals: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        for linear in self.linears:
            for parameter in (linear.weight, linear.bias):
                if parameter is not None and parameter.data_ptr() not in self._copies:
                    self._originals[parameter.data_ptr()] = parameter.detach()
                    self._copies[parameter.data_ptr()] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self._last: tuple[Any, Tensor] | None = None
        self._copied_at: int | None = None  # `_writes` at the time of the last copy

    @property
    def behind(self) -> int:
        """The number of writes to the weights that the copies do not include."""
        writes = self._writes()
        return writes if self._copied_at is None else writes - self._copied_at

    def _writes(self) -> int:
        return sum(original._version for original in self._originals.values())

    @property
    def bytes(self) -> int:
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def refresh(self) -> None:
        """Copy the current weights."""
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), list(self._originals.values()))
        self._copied_at = self._writes()

    def swaps(self) -> list[Swap]:
        return [Swap(linear, "forward", self._forward(linear)) for linear in self.linears]

    def _forward(self, linear: nn.Linear) -> Any:
        weight = self._copies[linear.weight.data_ptr()]
        bias = None if linear.bias is None else self._copies[linear.bias.data_ptr()]

        def forward(x: Tensor) -> Tensor:
            return functional.linear(self._cast(x), weight, bias)

        return forward

    def _cast(self, x: Tensor) -> Tensor:
        """Queries, keys and values (or gate and up) are projections of one tensor: cast it once."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, x.to(self.dtype))
        return self._last[1]

    def forget(self) -> None:
        """Drop the reference to the last input."""
        self._last = None
