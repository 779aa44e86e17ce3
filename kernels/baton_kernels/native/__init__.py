"""Ops for CPUs in C: compiled by the system's compiler on first use, called through ctypes.

Refuses to know: models, other implementations of the ops.
"""
