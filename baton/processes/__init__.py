"""Processes: start and end Baton's processes, and run expensive work in worker processes."""
