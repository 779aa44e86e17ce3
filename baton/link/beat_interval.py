"""Interval of beats between node and router; a module of its own, so that help loads fast."""

BEAT_INTERVAL_S = 0.25
