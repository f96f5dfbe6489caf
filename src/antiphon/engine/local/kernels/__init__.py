"""Kernels for a CUDA device, written in Triton, which torch's CUDA builds include."""
