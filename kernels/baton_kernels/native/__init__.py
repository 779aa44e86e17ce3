"""Ops for CPUs in C, called through ctypes. They are compiled on first use, or built ahead.

Refuses to know: models, other implementations of the ops.
"""
