"""Computing: the base of layers whose kernels (ops) can be chosen per model."""

from __future__ import annotations

from torch import nn

import baton_kernels
from baton_kernels.ops import Ops


class Computing(nn.Module):
    """A layer that computes with a set of kernels, which can be replaced.

    Attributes:
        ops: the kernels; by default, the fastest kernels for the device of the tensors.
    """

    ops: Ops = baton_kernels


def use_ops(model: nn.Module, ops: Ops) -> None:
    """Make all layers of a model compute with these kernels."""
    for module in model.modules():
        if isinstance(module, Computing):
            module.ops = ops
