"""Triton kernels of the ops in `baton_kernels.recurrent`, for mixers with a recurrent state.

Refuses to know: models, which request a slot belongs to.
"""
