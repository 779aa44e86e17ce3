"""Triton kernels over a cache of one vector per token (multi-head latent attention)."""
