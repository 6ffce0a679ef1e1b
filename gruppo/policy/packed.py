"""The policy on packed rows: no padding, each prompt once, one fused head.

While it runs, three parts of a model are replaced and restored afterwards: the attention becomes `packed_attention`
over segments that are passed as a forward argument, the head captures the hidden states instead of computing logits,
and norms, rotary embeddings and gated MLPs run in fewer kernels. Gradient checkpointing recomputes the layers in the
backward pass, so that must run inside `active` too; outside, it raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gruppo.errors import PackingError
from gruppo.kernels.attention import Segments, packed_attention
from gruppo.policy.fusion import fused_swaps
from gruppo.policy.head import ModelHead, Scores
from gruppo.policy.inplace import Swap, attention_swaps, swapped
from gruppo.policy.packing import PackedRows
from gruppo.policy.routing import Routing, routing_of
from gruppo.policy.sharding import is_sharded
from gruppo.policy.unwrap import inner_model

ATTENTION_NAME = "gruppo_packed"


class PackedPolicy:
    """Scores packed rows under a model, with or without gradients."""

    def __init__(
        self, *, fused_head: bool = True, fused_layers: bool = True, autocast_dtype: torch.dtype | None = None
    ):
        self.fused_head = fused_head
        self.fused_layers = fused_layers
        self.autocast_dtype = autocast_dtype
        # By id of the model: its parameters, and the swaps that run its layers in fewer kernels.
        self._fused: dict[int, tuple[Any, list[Swap]]] = {}

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model runs packed rows, forward and backward, and nothing else."""
        inner = inner_model(model)
        with swapped([*attention_swaps(inner, ATTENTION_NAME), *self._layer_swaps(inner)]):
            yield

    def score(
        self,
        model: nn.Module,
        pack: PackedRows,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> Scores:
        """Log-probs and entropies (M,) of the pack's scored tokens under the tempered distribution of the model.

        `model` may be wrapped (DDP, adapters, autocast); it is called once.
        """
        options = {"temperature": temperature, "entropy": entropy, "entropy_gradient": entropy_gradient}
        return self._score(model, pack, {}, options)[0]

    def score_routed(self, model: nn.Module, pack: PackedRows, **options: Any) -> tuple[Scores, Routing]:
        """`score` for a pack of whole rows, and how a mixture of experts has routed their tokens."""
        assert pack.repeats is not None
        scores, output = self._score(model, pack, {"output_router_logits": True}, options)
        return scores, routing_of(model, output.router_logits, pack.repeats)

    def _score(
        self, model: nn.Module, pack: PackedRows, arguments: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Scores, Any]:
        """The scores and the model's output."""
        head = ModelHead.of(model)
        caught: list[Tensor] = []
        run_head = head.module.forward
        with swapped([Swap(head.module, "forward", partial(_catch, caught, run_head))]):
            output = model(
                input_ids=pack.input_ids[None],
                position_ids=pack.position_ids[None],
                use_cache=False,
                logits_to_keep=0,
                packed_segments=pack.segments,
                **arguments,
            )
        if len(caught) != 1:
            raise PackingError(f"{type(inner_model(model)).__name__} calls its head {len(caught)} times, not once.")
        if hasattr(next(head.module.parameters(), None), "full_tensor"):
            raise PackingError(
                "The head's weights are sharded over processes again when its logits are computed. accelerate 1.15 "
                "leaves them gathered until the backward pass; use that, or set packed_update=False."
            )
        hidden = caught[0].squeeze(0)
        if hidden.requires_grad:
            hidden.register_hook(partial(_check_active, inner_model(model).config))
        options = {"temperature": 1.0, "entropy": False, "entropy_gradient": False} | options
        scored = hidden.index_select(0, pack.sources)
        scores = head.scores(
            scored, pack.targets, run_head, fused=self.fused_head, dtype=self.autocast_dtype, **options
        )
        return scores, output

    def learn(self, model: nn.Module) -> None:
        """Find out which layers can be fused, before the model is sharded over processes."""
        self._layer_swaps(inner_model(model))

    def _layer_swaps(self, model: Any) -> list[Swap]:
        if not self.fused_layers:
            return []
        parameters = [id(parameter) for parameter in model.parameters()]
        known, swaps = self._fused.get(id(model), (None, []))
        if is_sharded(model):  # its layers can be tried only before they are sharded, see `learn`
            return swaps
        if known != parameters:
            dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
            if self.autocast_dtype is not None:
                dtypes.add(self.autocast_dtype)
            swaps = fused_swaps(model, dtypes)
            self._fused[id(model)] = (parameters, swaps)
        return swaps


def _catch(caught: list[Tensor], run_head: Any, hidden: Tensor) -> Tensor:
    """Replaces the head's forward: keep the hidden states (1, N, H) and return the logits of zero tokens.

    The head itself computes them, so that a wrapper that looks for the parameters behind an output finds the head's.
    """
    caught.append(hidden)
    logits: Tensor = run_head(hidden[:, :0])
    return logits


def _check_active(config: Any, _: Tensor) -> None:
    if config._attn_implementation_internal != ATTENTION_NAME:
        raise PackingError(
            "The backward pass of packed rows runs outside of `PackedPolicy.active`. With gradient checkpointing the "
            "layers would be recomputed with a different attention. Call backward inside it, or set "
            "packed_update=False."
        )


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: (1, heads, N, D) in, (1, N, heads, Dv) out."""
    if packed_segments is None:
        raise PackingError(f"{type(module).__name__} does not pass forward arguments on to its attention.")
    if attention_mask is not None:
        raise PackingError(f"{type(module).__name__} makes its own attention mask.")
    if dropout:
        raise PackingError(
            f"{type(module).__name__} applies dropout to attention weights ({dropout}), which packed rows do not "
            "support."
        )
    # Autocast casts the inputs of attention, as it does for torch's own: rotated queries may be float32.
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    # Not x[0]: the gradient of a selection is a copy into zeros.
    queries, keys, values = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    out = packed_attention(
        queries,
        keys,
        values,
        packed_segments,
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)
