"""Simulated nodes: real ones over an executor that only takes time. No model, no torch."""
