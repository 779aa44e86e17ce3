"""Simulated nodes: real nodes over an executor that only takes time. No model, no torch."""
