"""Reads checkpoints' weights from files, and loads them into modules."""
