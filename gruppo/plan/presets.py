"""Shapes of public models by name, for planning before a model is chosen or loaded."""

from gruppo.plan.job import Model, Projection
from gruppo.plan.shape import ModelShape

# layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary; tied; kind, which determines the other weights
_SHAPES: dict[str, tuple[tuple[int, int, int, int, int, int, int], bool, str]] = {
    "smollm2-135m": ((30, 576, 1536, 9, 3, 64, 49152), True, "llama"),
    "smollm2-360m": ((32, 960, 2560, 15, 5, 64, 49152), True, "llama"),
    "smollm2-1.7b": ((24, 2048, 8192, 32, 32, 64, 49152), True, "llama"),
    "llama3-1b": ((16, 2048, 8192, 32, 8, 64, 128256), True, "llama"),
    "llama3-3b": ((28, 3072, 8192, 24, 8, 128, 128256), True, "llama"),
    "llama3-8b": ((32, 4096, 14336, 32, 8, 128, 128256), False, "llama"),
    "llama3-70b": ((80, 8192, 28672, 64, 8, 128, 128256), False, "llama"),
    "qwen2-0.5b": ((24, 896, 4864, 14, 2, 64, 151936), True, "qwen2"),
    "qwen2-1.5b": ((28, 1536, 8960, 12, 2, 128, 151936), True, "qwen2"),
    "qwen2-3b": ((36, 2048, 11008, 16, 2, 128, 151936), True, "qwen2"),
    "qwen2-7b": ((28, 3584, 18944, 28, 4, 128, 152064), False, "qwen2"),
    "qwen2-14b": ((48, 5120, 13824, 40, 8, 128, 152064), False, "qwen2"),
    "qwen2-32b": ((64, 5120, 27648, 40, 8, 128, 152064), False, "qwen2"),
    "qwen2-72b": ((80, 8192, 29568, 64, 8, 128, 152064), False, "qwen2"),
    "qwen3-0.6b": ((28, 1024, 3072, 16, 8, 128, 151936), True, "qwen3"),
    "qwen3-1.7b": ((28, 2048, 6144, 16, 8, 128, 151936), True, "qwen3"),
    "qwen3-4b": ((36, 2560, 9728, 32, 8, 128, 151936), True, "qwen3"),
    "qwen3-8b": ((36, 4096, 12288, 32, 8, 128, 151936), False, "qwen3"),
    "qwen3-14b": ((40, 5120, 17408, 40, 8, 128, 151936), False, "qwen3"),
    "qwen3-32b": ((64, 5120, 25600, 64, 8, 128, 151936), False, "qwen3"),
}
PRESETS = tuple(_SHAPES)
# Model sizes in increasing order; a forecast names the largest that fits.
CLASSES = ("qwen2-0.5b", "qwen2-1.5b", "qwen2-3b", "qwen2-7b", "qwen2-14b", "qwen2-32b", "qwen2-72b")


def preset(name: str) -> Model:
    """The model of this name, with its weights counted by formula.

    Example:
        preset("qwen2-1.5b").weights == 1_543_714_304
    """
    sizes, tied, kind = _SHAPES[name]
    shape = ModelShape(*sizes)
    queries, keys, hidden = shape.query_width, shape.key_width, shape.hidden
    sides = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, shape.intermediate),
        "up_proj": (hidden, shape.intermediate),
        "down_proj": (shape.intermediate, hidden),
    }
    # Norms of the hidden states, plus the biases of Qwen2's attention or the norms of Qwen3's queries and keys.
    small = 2 * hidden + {"llama": 0, "qwen2": queries + 2 * keys, "qwen3": 2 * shape.head_dim}[kind]
    embeddings = shape.vocabulary * hidden * (1 if tied else 2)
    return Model(
        name=name,
        shape=shape,
        weights=shape.layer_weights + shape.layers * small + hidden + embeddings,
        projections={side: Projection(shape.layers, *ends) for side, ends in sides.items()},
        tied=tied,
    )
