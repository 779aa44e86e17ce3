"""Triton kernels with which the ranks of one machine sum and gather tensors."""
