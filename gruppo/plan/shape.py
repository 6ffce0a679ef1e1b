"""The sizes of a decoder, and what its passes keep in memory and compute."""

from dataclasses import dataclass
from typing import Any

# Common names of the input projections of attention and of the MLP, and of the MLP's output projection.
_ATTENTION_IN = {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}
_MLP_IN = {"gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "c_fc", "fc1"}
_MLP_OUT = {"down_proj", "dense_4h_to_h", "fc2"}


@dataclass(frozen=True)
class Passes:
    """The settings of training passes that determine what layers keep for the backward pass.

    Example, float32 weights under bfloat16 autocast on a GPU:
        Passes(stream=4, product=2)
    """

    stream: int  # bytes per value of hidden states between layers, which have the weights' dtype
    product: int  # bytes per value of matmul operands, whose dtype autocast may narrow
    fused: bool = True  # fused kernels for norms, and on a GPU for rotary embeddings and gated MLPs
    device: str = "cuda"
    adapted: frozenset[str] | None = None  # the projections with an adapter; None: all weights are trained

    @property
    def mixed(self) -> bool:
        return self.stream != self.product

    @property
    def casts(self) -> int:
        """Copies of the normalised hidden states that a layer keeps, as operands of its projections.

        Projections with the same input share one copy, unless each casts it separately. They do so under autocast, and
        with adapters, which are float32 while the weights are narrower. A frozen projection without an adapter keeps
        none.
        """
        if self.adapted is None:
            return 5 if self.mixed else 2
        found = [self.adapted & _ATTENTION_IN, self.adapted & _MLP_IN]
        return sum(len(names) if self.product < 4 else bool(names) for names in found)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that memory depends on.

    Example, 1.5 billion parameters:
        ModelShape(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocabulary=151936)
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a transformers config; of a multimodal one, the text part."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
        )

    @property
    def query_width(self) -> int:
        """Width of a token's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of a token's keys in one layer; its values have the same width."""
        return self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """KV cache of one token, over all layers."""
        return 2 * self.layers * self.key_width * bytes_per_value

    def prefill_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Activations of a forward pass without gradients: copies of the hidden states, and one layer's own."""
        widths = 6 * self.hidden + 3 * self.intermediate + 2 * (self.heads + 2 * self.kv_heads) * self.head_dim
        return tokens * widths * bytes_per_value

    def layer_bytes(self, passes: Passes) -> int:
        """Activations of one token that one layer keeps from the forward to the backward pass.

        These are the inputs of norms and matmuls; queries, keys, values and the attention output; and the MLP's gate
        and up projections. Without fused operations, the intermediate results between them too.
        """
        stream, product, on_gpu = passes.stream, passes.product, passes.device == "cuda"
        norm = stream
        if not passes.fused or (not on_gpu and stream < 4):
            # PyTorch's unfused norm, in float32; it keeps the operand of its weight only if the weight is trained.
            norm = 4 + (0 if passes.adapted is not None else stream if not passes.fused else 4)
        # On a CPU, attention gathers rows of similar length: outputs are kept twice, keys and values again per reader.
        attention = (2, 2) if on_gpu else (3, 4)
        attended = attention[0] * self.query_width + attention[1] * self.key_width
        return (
            2 * norm * self.hidden
            + passes.casts * product * self.hidden
            + product * attended
            + product * self._mlp_copies(passes) * self.intermediate
        )

    @staticmethod
    def _mlp_copies(passes: Passes) -> int:
        """Copies that the MLP keeps: gate, up, and if not recomputed, the activated gate and the operand of `down`."""
        fused = passes.fused and passes.device == "cuda"
        if passes.adapted is not None:
            return (2 if fused else 3) + bool(passes.adapted & _MLP_OUT)
        return 4 if not fused else 3 if passes.mixed else 2

    def stream_bytes(self, passes: Passes) -> int:
        """Bytes per token of the inputs of all layers, which is what gradient checkpointing keeps."""
        return self.layers * self.hidden * passes.stream

    def update_bytes(self, passes: Passes, *, checkpointing: bool) -> int:
        """Peak bytes per token in a forward and backward pass.

        The activations of all layers, or with checkpointing the inputs of all layers and the activations of one; plus
        the gradients inside the layer whose backward pass is running.
        """
        layer, working = self.layer_bytes(passes), self.backward_bytes(passes)
        return working + (layer + self.stream_bytes(passes) if checkpointing else self.layers * layer)

    def backward_bytes(self, passes: Passes) -> int:
        """Bytes per token of the gradients inside the running layer: gate, up, their product, and hidden states."""
        return (3 * self.intermediate + 2 * self.hidden) * passes.product

    def cast_bytes(self, passes: Passes) -> int:
        """Bytes of the layers' weights that autocast copies in the forward pass and keeps for the backward pass."""
        return self.layer_weights * passes.product if passes.mixed else 0

    def logits_bytes(self, rows: int, bytes_per_value: int, *, filtered: bool) -> int:
        """Bytes of the logits of one decoding step; filters such as top-k work on sorted float32 copies of them."""
        return rows * self.vocabulary * (bytes_per_value + (24 if filtered else 0))

    @property
    def layer_weights(self) -> int:
        """Weights of all layers that each token is multiplied by: attention projections and a gated MLP."""
        return self.layers * self.hidden * (2 * (self.query_width + self.key_width) + 3 * self.intermediate)

    def forward_flops(self, tokens: float, context: float, scored: float) -> float:
        """Floating-point operations of a forward pass over `tokens` that attend to `context` keys each on average.

        Two per weight and token, those of the LM head for `scored` tokens only, and four per key, head and dimension.
        Norms, activations and the softmax are not counted. A backward pass takes twice as many.
        """
        attention = 4 * context * self.layers * self.query_width
        return tokens * (2 * self.layer_weights + attention) + 2 * scored * self.hidden * self.vocabulary
