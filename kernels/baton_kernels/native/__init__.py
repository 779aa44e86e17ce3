"""Ops for CPUs in C: built by the system's compiler when first used, called through ctypes.

Refuses to know: models, what computes the ops where there is no compiler.
"""
