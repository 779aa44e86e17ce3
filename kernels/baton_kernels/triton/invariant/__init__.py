"""Kernels whose result for a token does not depend on the batch."""
