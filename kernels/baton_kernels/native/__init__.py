"""Ops for CPUs in C, called through ctypes; compiled on first use, or ahead of time.

Refuses to know: models, other implementations of the ops.
"""
