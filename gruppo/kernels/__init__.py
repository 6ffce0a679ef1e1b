"""Operations of a decoder that are worth a kernel of their own, each in plain torch and, for CUDA, in Triton."""
