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
class LayerShape:
    """The sizes of one layer."""

    intermediate: int
    heads: int
    kv_heads: int  # 0: the layer attends to the keys and values of an earlier one
    head_dim: int

    @property
    def query_width(self) -> int:
        """Width of a token's queries."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of a token's keys; its values have the same width."""
        return self.kv_heads * self.head_dim


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
    unequal: tuple[LayerShape, ...] = ()  # if layers differ, the sizes of each; those above are then the largest

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a transformers config; of a multimodal one, the text part. ValueError if it lacks a size."""
        shape, reason = cls.read(config)
        if shape is None:
            raise ValueError(f"the sizes of its layers are not known: {reason}")
        return shape

    @classmethod
    def read(cls, config: Any) -> tuple["ModelShape | None", str]:
        """The shape of a transformers config, or None and the reason why it is not known."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes = {name: getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
        known = {name: size for name, size in sizes.items() if isinstance(size, int)}
        count = known["num_hidden_layers"] if len(known) == len(sizes) else 0
        layers = [_read_layer(text, i, known["hidden_size"]) for i in range(count)]
        found = [layer for layer in layers if layer is not None]
        if not found or len(found) < len(layers):
            missing = [name for name in sizes if name not in known] or ["num_attention_heads"]
            return None, f"{type(text).__name__} has no {', '.join(missing)}"
        shape = cls(
            layers=len(found),
            hidden=known["hidden_size"],
            intermediate=max(layer.intermediate for layer in found),
            heads=max(layer.heads for layer in found),
            kv_heads=max(layer.kv_heads for layer in found),
            head_dim=max(layer.head_dim for layer in found),
            vocabulary=known["vocab_size"],
            unequal=tuple(found) if len(set(found)) > 1 else (),
        )
        return shape, ""

    @property
    def per_layer(self) -> tuple[LayerShape, ...]:
        equal = LayerShape(self.intermediate, self.heads, self.kv_heads, self.head_dim)
        return self.unequal or (equal,) * self.layers

    @property
    def query_width(self) -> int:
        """Width of a token's queries in the widest layer."""
        return max(layer.query_width for layer in self.per_layer)

    @property
    def key_width(self) -> int:
        """Width of a token's keys in the widest layer; its values have the same width."""
        return max(layer.key_width for layer in self.per_layer)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """KV cache of one token, over all layers."""
        return 2 * sum(layer.key_width for layer in self.per_layer) * bytes_per_value

    def prefill_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Activations of a forward pass without gradients: copies of the hidden states, and one layer's own."""
        own = (3 * layer.intermediate + 2 * (layer.query_width + 2 * layer.key_width) for layer in self.per_layer)
        return tokens * (6 * self.hidden + max(own)) * bytes_per_value

    def layer_bytes(self, passes: Passes, *, mean: bool = False) -> int:
        """Activations of one token that the largest layer, or the mean one, keeps for the backward pass.

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
        mlp = self._mlp_copies(passes)
        widths = [
            attention[0] * layer.query_width + attention[1] * layer.key_width + mlp * layer.intermediate
            for layer in self.per_layer
        ]
        width = sum(widths) // self.layers if mean else max(widths)
        return 2 * norm * self.hidden + passes.casts * product * self.hidden + product * width

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
        working = self.backward_bytes(passes)
        if checkpointing:
            return working + self.layer_bytes(passes) + self.stream_bytes(passes)
        return working + self.layers * self.layer_bytes(passes, mean=True)

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
        widths = (2 * (layer.query_width + layer.key_width) + 3 * layer.intermediate for layer in self.per_layer)
        return self.hidden * sum(widths)

    def forward_flops(self, tokens: float, context: float, scored: float) -> float:
        """Floating-point operations of a forward pass over `tokens` that attend to `context` keys each on average.

        Two per weight and token, those of the LM head for `scored` tokens only, and four per key, head and dimension.
        Norms, activations and the softmax are not counted. A backward pass takes twice as many.
        """
        attention = 4 * context * sum(layer.query_width for layer in self.per_layer)
        return tokens * (2 * self.layer_weights + attention) + 2 * scored * self.hidden * self.vocabulary


@dataclass(frozen=True)
class MeasuredShape:
    """What an update's plan needs of a model whose config does not give the sizes of its layers."""

    layers: int
    hidden: int
    vocabulary: int
    layer_weights: int
    kept: int  # bytes of activations of one token that all layers keep for the backward pass

    def update_bytes(self, passes: Passes, *, checkpointing: bool) -> int:
        """Peak bytes per token, as those of `ModelShape`; the gradients inside a layer take what it keeps."""
        layer = self.kept // self.layers
        return layer + (layer + self.layers * self.hidden * passes.stream if checkpointing else self.kept)

    def cast_bytes(self, passes: Passes) -> int:
        """Bytes of the layers' weights that autocast copies."""
        return self.layer_weights * passes.product if passes.mixed else 0


def _read_layer(text: Any, i: int, hidden: int) -> LayerShape | None:
    """The sizes of the i-th layer of a text config; None if it has no attention heads."""
    own = text.per_layer_config[i] if getattr(text, "is_heterogeneous", False) else text

    def read(*names: str) -> int | None:
        values = (getattr(own, name, None) for name in names)
        return next((value[i] if isinstance(value, list | tuple) else value for value in values if value), None)

    heads = read("num_attention_heads_per_layer", "num_attention_heads")
    if heads is None:
        return None
    kinds = getattr(text, "layer_types", None)
    kv_heads, head_dim = read("num_key_value_heads"), read("head_dim")
    if kinds and kinds[i] == "full_attention":  # Gemma 4 before transformers had configs of single layers
        head_dim = read("global_head_dim") or head_dim
        kv_heads = (read("num_global_key_value_heads") if read("attention_k_eq_v") else None) or kv_heads
    shares = i >= text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    wide = 2 if shares and getattr(text, "use_double_wide_mlp", False) else 1
    width = wide * (read("intermediate_size") or 4 * hidden)
    return LayerShape(width, heads, 0 if shares else kv_heads or heads, head_dim or hidden // heads)
