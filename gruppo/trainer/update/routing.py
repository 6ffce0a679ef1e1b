"""The load-balancing loss of a mixture-of-experts model, in addition to the policy loss.

It is defined on all tokens of a micro-batch, with the prompt counted once for every row. In packed rows a prompt is
weighted by the number of rows that share it. If a micro-batch takes several packs, the number of times each expert was
chosen must be known before the first backward pass, so its packs are first run once without gradients.
"""

from torch import Tensor

from gruppo.algo.reduce import UpdateSize
from gruppo.policy.routing import Routing
from gruppo.trainer.update.rows import PackedUpdate


def share_of_micro_batch(router_loss: Tensor, coefficient: float, size: UpdateSize) -> Tensor:
    """A micro-batch's share of the load-balancing loss in the loss of the update over all processes."""
    return coefficient * router_loss / size.micro_batches


def share_of_pack(routing: Routing, update: PackedUpdate, micro_batch: int, coefficient: float) -> Tensor:
    """A pack's share, from the routing of its own tokens and how often the whole micro-batch chose each expert."""
    whole = update.routing.setdefault(micro_batch, routing.detach())
    return share_of_micro_batch(whole.loss(routing), coefficient, update.size)
