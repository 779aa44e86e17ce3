"""Kernels of token mixers with a state; one module per op of `baton_kernels.recurrent`.

Refuses to know: models, which request a slot belongs to.
"""
