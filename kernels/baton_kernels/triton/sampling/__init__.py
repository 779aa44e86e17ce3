"""Kernels that draw tokens on the GPU, so that only token ids are copied to the host."""
