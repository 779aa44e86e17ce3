"""Faults during a load test: their schedule, the processes they hit, and leaked blocks."""
