"""Simulated nodes: real nodes whose executor only waits. They need no weights and no torch."""
