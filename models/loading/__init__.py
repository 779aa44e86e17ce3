"""Loads weights from files into modules."""
