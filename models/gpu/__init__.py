"""Packers for GPUs: weights of 4 and 8 bits, and batch-invariant layers."""
