"""Simulated nodes: speak the node protocol and keep its timing, without a model. No torch."""
