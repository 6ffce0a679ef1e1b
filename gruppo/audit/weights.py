"""Whether the weights change, measured on a few elements of a few tensors."""

import random
from collections.abc import Iterable

import torch
from torch import Tensor, nn

SEED = 0  # the same elements in every process and every run


class WeightProbe:
    """Watches up to `per_tensor` elements of up to `tensors` trainable parameters.

    Elements are chosen at random with a fixed seed. A regular stride could hit only one kind of parameter where kinds
    alternate, as the A and B matrices of adapters do. The model may keep using its parameters and move them.

    Example:
        probe = WeightProbe(model.parameters())
        optimizer.step()
        probe.changed()    # 0.98: the share of the elements that differ from when they were last looked at
    """

    def __init__(self, parameters: Iterable[nn.Parameter], per_tensor: int = 64, tensors: int = 16):
        chance = random.Random(SEED)
        trainable = [parameter for parameter in parameters if parameter.requires_grad and _local(parameter).numel()]
        chosen = chance.sample(trainable, min(tensors, len(trainable)))
        self._watched = [(parameter, _elements(_local(parameter), per_tensor, chance)) for parameter in chosen]
        self.last = self._read()

    def changed(self) -> float | None:
        """The share that changed since the last call or the creation of the probe; None if there is nothing to watch.

        It synchronises with the device once, to read one number.
        """
        before, self.last = self.last, self._read()
        return self.changed_since(before)

    def changed_since(self, before: Tensor | None) -> float | None:
        """The share of `self.last` that differs from `before`, the `last` of an earlier probe of the same parameters.

        None if either is missing or their shapes differ.
        """
        if self.last is None or before is None or before.shape != self.last.shape:
            return None
        return float((self.last != before.to(self.last.device)).float().mean())

    @torch.no_grad()
    def _read(self) -> Tensor | None:
        if not self._watched:
            return None
        values = [_local(parameter)[place].reshape(-1) for parameter, place in self._watched]
        return torch.cat([value.to(values[0].device) for value in values])  # in the widest dtype: nothing is rounded


def _local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this process holds: all of it, or its shard under FSDP2 (`to_local`) or ZeRO-3."""
    share: Tensor = getattr(parameter, "ds_tensor", parameter)
    to_local = getattr(share, "to_local", None)
    local: Tensor = share.detach() if to_local is None else to_local().detach()
    return local


def _elements(tensor: Tensor, count: int, chance: random.Random) -> tuple[Tensor, ...]:
    """Indices of the elements, one tensor per dimension; flattening the tensor instead could copy all of it."""
    flat = torch.tensor(chance.sample(range(tensor.numel()), min(count, tensor.numel())))
    return torch.unravel_index(flat.to(tensor.device), tuple(tensor.shape))
