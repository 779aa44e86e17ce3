"""Kernels of token mixers with a state; a module for each op of `baton_kernels.recurrent`.

Refuses to know: models, who owns a slot.
"""
