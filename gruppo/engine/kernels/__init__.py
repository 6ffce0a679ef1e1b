"""The engine's GPU kernels, in Triton. `gruppo.engine.ops` chooses between these and `gruppo.engine.reference`."""

from gruppo.engine.kernels.decode import decode_attention
from gruppo.engine.kernels.prefill import prefill_attention
from gruppo.engine.kernels.sampling import sample_tokens
from gruppo.engine.kernels.write import write_kv

__all__ = [
    "decode_attention",
    "prefill_attention",
    "sample_tokens",
    "write_kv",
]
