"""Batch-invariant kernels: a token's result does not depend on the rest of the batch."""
