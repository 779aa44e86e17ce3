"""Tests that the table of cosines and sines gives equal bits, with one kernel per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import ModelConfig
from models.layers import rotary
from models.layers.rotary import RotaryEmbedding
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

NUM_POSITIONS = 500
VIEWS = {"view", "select", "unbind", "alias", "detach"}


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of the torch operations that run, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def embedding() -> RotaryEmbedding:
    model = ModelConfig.from_folder(DEMO_MODEL)
    return RotaryEmbedding(model.rope, model.head_dim, NUM_POSITIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_looks_up_what_it_would_compute(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = torch.tensor([0, 17, 3, NUM_POSITIONS - 1, 17])
    with monkeypatch.context() as patch:
        patch.setattr(rotary, "MAX_TABLE_BYTES", 0)
        computed = embedding()(positions, NUM_POSITIONS, dtype)
    of_table = embedding()
    with torch.inference_mode():
        of_table(positions, NUM_POSITIONS, dtype)
    with Kernels() as kernels:
        found = of_table(positions, NUM_POSITIONS, dtype)
    assert kernels.names == ["index_select"]
    for one, other in zip(found, computed, strict=True):
        assert one.is_contiguous()
        assert one.dtype is dtype
        assert torch.equal(one, other)


def test_a_table_grows_with_sequences_and_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result may depend on the lengths that a node has seen before."""
    monkeypatch.setattr(rotary, "LEAST_POSITIONS", 3)
    one, every = embedding(), torch.arange(NUM_POSITIONS)
    whole = torch.stack(embedding()(every, NUM_POSITIONS, torch.float32))
    for length in (1, 3, 4, 5, 33, 130, 32, 257, NUM_POSITIONS):
        found = torch.stack(one(every[:length], length, torch.float32))
        assert torch.equal(found, whole[:, :length])
        alone = torch.stack(embedding()(every[length - 1 : length], length, torch.float32))
        assert torch.equal(alone, whole[:, length - 1 : length])


def test_a_table_that_is_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "MAX_TABLE_BYTES", 1000)
    positions = torch.tensor([5])
    with Kernels() as kernels:
        embedding()(positions, NUM_POSITIONS, torch.bfloat16)
    assert "index_select" not in kernels.names
    assert len(kernels.names) > 5
