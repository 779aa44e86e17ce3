"""Layers that compute with ops, and the choice of ops for a model."""

from __future__ import annotations

from torch import nn

import baton_kernels
from baton_kernels.ops import Ops


class Computing(nn.Module):
    """A layer that computes with ops.

    Attributes:
        ops: computes the ops; by default the fastest implementation for the tensors' device.
    """

    ops: Ops = baton_kernels


def use_ops(model: nn.Module, ops: Ops) -> None:
    """Make all layers of a model compute with these ops."""
    for module in model.modules():
        if isinstance(module, Computing):
            module.ops = ops
