"""Ops for CPUs in C: built by the system's compiler when first used, called through ctypes.

Refuses to know: models, and what is computed instead where there is no compiler.
"""
