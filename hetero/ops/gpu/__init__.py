"""Operators that run on the GPU, as Triton kernels; imported only where a rule asks for them."""
