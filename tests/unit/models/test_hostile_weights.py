"""Unit tests of quantized weights with parts of any shape and type: numbers, or one line."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.api.errors import ModelLoadError
from models.loading.quantized_weights import STORAGES, read_quantized
from models.loading.stored_weights import StoredTensor
from models.quantization import QuantizationConfig

NUM_TRIES = 300
SIZES = (0, 1, 2, 3, 4, 8, 16, 32, 33)
TYPES = (
    torch.int32, torch.int8, torch.uint8, torch.float32, torch.bfloat16, torch.int64,
    torch.float8_e4m3fn, torch.bool,
)  # fmt: skip


def any_tensor(draw: random.Random) -> Tensor:
    shape = [draw.choice(SIZES) for _ in range(draw.choice((0, 1, 2, 2, 2, 3, 4)))]
    found = torch.full(shape, draw.choice((0, 1, -1, 2**31 - 1)), dtype=torch.int64)
    dtype = draw.choice(TYPES)
    return (found.float() if dtype.is_floating_point else found).to(dtype)


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("method", sorted(STORAGES))
def test_parts_that_do_not_fit_are_an_error_of_one_line(method: str) -> None:
    draw, refused = random.Random(method), list[str]()
    for _ in range(NUM_TRIES):
        storage = draw.choice(STORAGES[method])
        may_have = [one for one in sorted(storage.may_have) if draw.random() < 0.5]
        suffixes = sorted(storage.parts) + may_have
        parts = {f"l.{suffix}": any_tensor(draw) for suffix in suffixes}
        stored = {
            name: StoredTensor(Path("file"), name, functools.partial(torch.clone, tensor))
            for name, tensor in parts.items()
        }
        block_shape = draw.choice((None, (2, 4), (128, 128)))
        config = QuantizationConfig(method, block_shape=block_shape)
        for one in read_quantized(stored, config):
            for read in (one.read, one.read_integers, one.read_float8):
                try:
                    _ = read and read()
                except ModelLoadError as error:
                    refused.append(str(error))
    assert refused
    assert all(problem.startswith("file: l: ") for problem in refused)
