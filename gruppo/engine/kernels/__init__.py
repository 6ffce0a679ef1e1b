"""The engine's GPU kernels, in Triton. `gruppo.engine.ops` chooses between these and `gruppo.engine.reference`."""

from gruppo.engine.kernels.decode import decode_attention
from gruppo.engine.kernels.elementwise import gated, rms_norm, rotary, write_kv
from gruppo.engine.kernels.prefill import prefill_attention
from gruppo.engine.kernels.sampling import sample_tokens

__all__ = [
    "decode_attention",
    "gated",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "sample_tokens",
    "write_kv",
]
