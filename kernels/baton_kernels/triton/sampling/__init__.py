"""Kernels that draw tokens: logits stay on the GPU, token ids leave it."""
