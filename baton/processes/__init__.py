"""Processes: their life, their children, workers for what may take too long."""
