"""Faults during a load test: their schedule, the affected processes, and leaked KV blocks."""
