"""Simulated nodes: real nodes whose executor only waits. No model, no torch."""
