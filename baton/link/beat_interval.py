"""Seconds between beats of node and router; apart from the link's code so that --help is fast."""

BEAT_INTERVAL_S = 0.25
