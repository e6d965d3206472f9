"""Triton kernels, equal bit for bit to the plain torch reference."""
