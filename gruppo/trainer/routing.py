"""The load-balancing loss of a mixture of experts, beside the loss of the policy.

It is defined on a micro-batch, all of its tokens, prompts included once for every row. In packed rows a prompt stands
for all rows that share it; where a micro-batch takes several packs, how often each expert was chosen must be known
before the first backward pass, so its packs are run once without a gradient.
"""

from typing import Any

from torch import Tensor

from gruppo.policy.routing import Routing
from gruppo.trainer.collecting import Collecting
from gruppo.trainer.metrics import value_stat
from gruppo.trainer.update_rows import Update


class RouterLoss(Collecting):
    """The part of the trainer that keeps routers even."""

    _size: Any  # of the update under way

    @property
    def aux_loss_enabled(self) -> bool:
        return self.router_aux_loss_coef != 0

    def _weighted(self, router_loss: Tensor) -> Tensor:
        """A micro-batch's load-balancing loss as a part of the loss of all processes' update."""
        return self.router_aux_loss_coef * router_loss / self._size.micro_batches

    def _with_router_share(self, loss: Tensor, update: Update, micro_batch: int | None, routing: Any) -> Tensor:
        """The loss of a pack, with its share of the load-balancing loss of its micro-batch."""
        if routing is None or micro_batch is None:
            return loss
        whole: Routing = update.routing.setdefault(micro_batch, routing.detach())
        return loss + self._weighted(whole.loss(routing))

    def _with_router_loss(self, loss: Tensor, router_loss: Tensor | None) -> Tensor:
        """The loss of a micro-batch, with its load-balancing loss, which is logged."""
        if router_loss is None:
            return loss
        self.metrics.defer({"aux_loss": value_stat(router_loss)})
        return loss + self._weighted(router_loss)
