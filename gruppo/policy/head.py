"""The language-model head of a model: where it is, how its logits are scaled, and scores computed with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gruppo.algo.logprobs import entropy_from_logits, selective_log_softmax
from gruppo.kernels.head import Head, head_scores
from gruppo.policy.float32_head import Float32Head
from gruppo.policy.sharding import own_class
from gruppo.policy.unwrap import inner_model

# Number of tokens whose logits exist at once if the head can only be run as a module.
_TOKENS_AT_ONCE = 1024


class Scores(NamedTuple):
    """Log-probs (M,) of the wanted tokens and, if asked for, entropies (M,) of their distributions."""

    logps: Tensor
    entropies: Tensor | None


@dataclass(frozen=True)
class ModelHead:
    """A model's head and what follows it: logits = cap(scale · module(hidden))."""

    module: nn.Module
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: nn.Module) -> "ModelHead":
        inner = inner_model(model)
        text = inner.config.get_text_config()
        if isinstance(getattr(inner, "logit_scale", None), int | float):  # Cohere
            scale = float(inner.logit_scale)
        else:
            scale = 1 / (getattr(text, "logits_scaling", None) or 1.0)  # Granite
        return cls(inner.get_output_embeddings(), scale, getattr(text, "final_logit_softcapping", None))

    @property
    def linear(self) -> Head | None:
        """The head as one matrix; None if something else is in its place, such as an adapter."""
        module = self._active
        if own_class(module) not in (nn.Linear, Float32Head):
            return None
        return Head(module.weight, module.bias, self.scale, self.softcap)

    @property
    def _active(self) -> Any:
        module: Any = self.module
        if not hasattr(module, "modules_to_save"):
            return module
        active = module.active_adapters[0] if module.active_adapters else None  # peft's full copy of a module
        return module.original_module if module.disable_adapters else module.modules_to_save[active]

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and cap the output of the head, as the model does."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def scores(
        self,
        hidden: Tensor,
        targets: Tensor,
        run: Callable[[Tensor], Tensor],
        *,
        fused: bool,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
        dtype: torch.dtype | None,
    ) -> Scores:
        """Scores of tokens (M,) predicted from hidden states (M, H); `run` is the head's own forward.

        If not fused, or if the head is not a plain matrix, logits are computed for a chunk of tokens at a time and
        recomputed in the backward pass.
        """
        linear = self.linear if fused else None
        if isinstance(self._active, Float32Head):
            dtype = None  # it disables autocast
        if linear is not None:
            logps, entropies = head_scores(
                hidden,
                linear,
                targets,
                temperature=temperature,
                entropy=entropy,
                entropy_gradient=entropy_gradient,
                dtype=dtype,
            )
            return Scores(logps, entropies)

        def stretch(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype is not None):
                logits = self.finish(run(hidden))
            logps = selective_log_softmax(logits, targets, temperature=temperature)
            if not entropy:
                return logps, logps.new_zeros(0)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                return logps, entropy_from_logits(logits, temperature=temperature)

        parts = [
            checkpoint(stretch, *part, use_reentrant=False)
            for part in zip(hidden.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True)
        ]
        every = [torch.cat(values) for values in zip(*parts, strict=True)]
        return Scores(every[0], every[1] if entropy else None)
