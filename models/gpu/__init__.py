"""Packers for GPUs, which quantize layers to 4 or 8 bits, or make them batch-invariant."""
