"""Triton kernels of multi-head latent attention, whose cache has one vector per token."""
