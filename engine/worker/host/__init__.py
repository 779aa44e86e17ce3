"""The machine that a worker computes on: which cores, how much memory. Knows no tensor."""
