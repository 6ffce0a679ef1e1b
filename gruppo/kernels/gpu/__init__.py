"""Triton kernels. The modules above choose between these and plain torch."""
