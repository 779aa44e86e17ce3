"""Faster inference on CPUs: packed weights, and tapes (recorded native calls) of decode steps."""
