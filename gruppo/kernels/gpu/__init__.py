"""Triton kernels. The modules of `gruppo.kernels` choose between these and plain torch."""
