"""Mixtures of experts: how evenly a router spreads its tokens, and the loss that keeps it even.

Over the tokens of a micro-batch and all layers, f_e is how often a token was sent to expert e, and p_e the mean
probability that the router gave that expert. The loss of E experts is E · Σ_e f_e · p_e
(https://arxiv.org/abs/2101.03961). Only p has a gradient, so the loss can be summed over parts of a micro-batch once f
is known for all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ConfigError
from gruppo.policy.unwrap import forward_arguments, inner_model


@dataclass(frozen=True)
class Routing:
    """Sums over tokens and layers, from which f and p follow."""

    chosen_E: Tensor  # how often each expert was chosen
    probability_E: Tensor  # summed over all tokens
    tokens: Tensor  # 0-d; a token counts once for each layer

    @classmethod
    def of(cls, router_logits: Sequence[Tensor], repeats_N: Tensor, top_k: int) -> "Routing":
        """The sums for tokens that count `repeats_N` times each.

        Example, one layer, two experts, a prompt's token that two rows share and one of a completion:
            Routing.of([tensor([[0.0, 9.0], [9.0, 0.0]])], tensor([2, 1]), 1).chosen_E == tensor([1.0, 2.0])
        """
        parts = [_sums(logits, repeats_N, top_k) for logits in router_logits]
        chosen, probability = (torch.stack(sums).sum(0) for sums in zip(*parts, strict=True))
        return cls(chosen, probability, len(parts) * repeats_N.sum().to(chosen.dtype))

    def __add__(self, other: "Routing") -> "Routing":
        return Routing(
            self.chosen_E + other.chosen_E, self.probability_E + other.probability_E, self.tokens + other.tokens
        )

    def detach(self) -> "Routing":
        return Routing(self.chosen_E, self.probability_E.detach(), self.tokens)

    def loss(self, part: "Routing | None" = None) -> Tensor:
        """The load-balancing loss (0-d) of these tokens, or the contribution of `part` of them."""
        part = part or self
        return len(self.chosen_E) * (self.chosen_E / self.tokens * (part.probability_E / self.tokens)).sum()


def _sums(logits_NE: Tensor, repeats_N: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    probability_NE = logits_NE.softmax(-1, dtype=torch.promote_types(logits_NE.dtype, torch.float32))
    weights_N = repeats_N.to(probability_NE.dtype)
    experts = probability_NE.detach().topk(top_k, -1).indices.flatten()
    chosen_E = weights_N.new_zeros(logits_NE.shape[-1]).index_add(0, experts, weights_N.repeat_interleave(top_k))
    return chosen_E, weights_N @ probability_NE


def router_coefficient(model: Any, asked: float | None) -> float:
    """The weight of the load-balancing loss: the one asked for, else the model's own; 0 without a router."""
    config = inner_model(model).config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        if asked:
            raise ConfigError(
                f"router_aux_loss_coef={asked} needs a mixture of experts that shows its router's logits; "
                f"{type(inner_model(model)).__name__} does not. Leave it out."
            )
        return 0.0
    own = getattr(config, "router_aux_loss_coef", None) or 0.0
    return float(own if asked is None else asked)


def routing_of(model: Any, router_logits: Any, repeats_N: Tensor) -> Routing:
    """The sums for the router logits that a model's forward pass returned."""
    inner = inner_model(model)
    if not router_logits:
        raise ConfigError(_no_loss(inner))
    return Routing.of(
        [logits.view(-1, logits.shape[-1]) for logits in router_logits], repeats_N, experts_per_token(inner)
    )


def experts_per_token(inner: Any) -> int:
    """How many experts a token is sent to."""
    config = inner.config.get_text_config()
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    return int(next(getattr(config, name) for name in names if hasattr(config, name)))


def own_router_loss(model: nn.Module, output: Any) -> Tensor:
    """The load-balancing loss that a model's forward pass has computed itself."""
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(_no_loss(inner_model(model)))
    return loss


def _no_loss(inner: Any) -> str:
    return (
        f"{type(inner).__name__} returns no router logits in this version of transformers, so there is no "
        "load-balancing loss to train with. Set router_aux_loss_coef=0, or use another version."
    )


@torch.no_grad()
def check_router(model: nn.Module, *, run: bool = True) -> None:
    """Raise if the model does not compute a load-balancing loss although its config has settings for it.

    Without `run`, as where its weights are sharded, only the arguments of its forward are looked at.
    """
    inner = inner_model(model)
    if "output_router_logits" not in forward_arguments(model):
        raise ConfigError(_no_loss(inner))
    if not run:
        return
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(inner.parameters()).device)
    own_router_loss(model, type(inner).forward(inner, input_ids=ids, use_cache=False, output_router_logits=True))
