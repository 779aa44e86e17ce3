"""Processes: how they start and end, their children, and workers for expensive work."""
