"""Simulated nodes: real nodes whose executor waits instead of computing. No model, no torch."""
