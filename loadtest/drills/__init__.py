"""Faults during a load test: their schedule, the processes that they hit, and leaked blocks."""
