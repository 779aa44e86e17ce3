"""How often a node and its router tell each other that they live. Help waits for no more."""

BEAT_INTERVAL_S = 0.25
