"""Kernels in Triton, for NVIDIA GPUs of compute capability 8.0 and newer.

Refuses to know: models, schedulers. ``baton_kernels.reference`` defines each op.
"""
