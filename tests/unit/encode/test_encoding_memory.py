"""Encodings keep all bits on their way through memory, and units without holders are free."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from engine.worker.extras.encodings import Encodings
from node_runtime.encodings.memory import EncodingMemory
from node_runtime.encodings.units import Units


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_embeddings", [1, 16, 33])
def test_an_encoding_is_read_as_it_was_written(dtype: torch.dtype, num_embeddings: int) -> None:
    memory = EncodingMemory(5, 6, dtype)
    written = torch.randn(num_embeddings, 6).to(dtype)
    units = (4, 0, 2)[: -(-num_embeddings // 16)]
    memory.write(units, written)
    found = memory.read(units, num_embeddings)
    assert found is not None
    assert found.is_encoding
    worker = Encodings(cast("Any", None), torch.device("cpu"))
    assert torch.equal(worker._to_tensor(found.arrays[0]), written)
    memory.tensor[units[-1], 0, (num_embeddings - 1) % 16, 5] = torch.inf
    assert memory.read(units, num_embeddings) is None


def test_units_are_free_when_nobody_holds_them() -> None:
    units = Units(3)
    taken = units.take(2)
    assert taken is not None
    assert units.take(2) is None, "all or none"
    units.hold(taken)
    units.release(taken)
    assert (units.num_free, dict(units.ref_counts())) == (1, dict.fromkeys(taken, 1))
    units.release(taken)
    assert units.num_free == 3
