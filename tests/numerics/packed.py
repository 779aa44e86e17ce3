"""Reads the contents of a packed weight, for tests."""

from __future__ import annotations

import torch

import baton_kernels as ops


def numbers_of(weight: ops.PackedWeight) -> list[torch.Tensor | None]:
    """Return all that a packed weight keeps."""
    groups = () if weight.groups is None else weight.groups.tensors
    return [weight.panels, weight.scales, *groups]
