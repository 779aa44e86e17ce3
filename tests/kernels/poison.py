"""Poisons memory: every number that a kernel has not written is NaN, so that reading it shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every fresh tensor of a test is full of NaN, or of the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def strided(x: torch.Tensor, padding: int = 3) -> torch.Tensor:
    """Return equal values in rows with gaps of NaN between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + padding), torch.nan).to(x)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]
