"""Processes: their start and end, their children, and workers for costly work."""
