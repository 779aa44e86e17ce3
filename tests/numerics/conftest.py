"""Restores the numbers of threads that a test changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, threads_as_before: None) -> None:
    """Run the test once with one thread and once with two."""
    torch.manual_seed(0)
    torch.set_num_threads(request.param)
