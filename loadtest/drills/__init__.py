"""Faults during a load test: their plan, their place, what became of requests."""
