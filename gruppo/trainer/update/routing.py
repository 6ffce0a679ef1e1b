"""The load-balancing loss of a mixture of experts, beside the loss of the policy.

It is defined on a micro-batch, all of its tokens, prompts included once for every row. In packed rows a prompt stands
for all rows that share it; where a micro-batch takes several packs, how often each expert was chosen must be known
before the first backward pass, so its packs are run once without a gradient.
"""

from torch import Tensor

from gruppo.algo.reduce import UpdateSize
from gruppo.policy.routing import Routing
from gruppo.trainer.update.rows import Update


def share_of_micro_batch(router_loss: Tensor, coefficient: float, size: UpdateSize) -> Tensor:
    """A micro-batch's load-balancing loss as a part of the loss of all processes' update."""
    return coefficient * router_loss / size.micro_batches


def share_of_pack(routing: Routing, update: Update, micro_batch: int, coefficient: float) -> Tensor:
    """A pack's part of it: where its own tokens went, given how often all of the micro-batch chose each expert."""
    whole = update.routing.setdefault(micro_batch, routing.detach())
    return share_of_micro_batch(whole.loss(routing), coefficient, update.size)
