"""Decoder operations that are worth a dedicated kernel, each in plain torch and, for CUDA, in Triton."""
