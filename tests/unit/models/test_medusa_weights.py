"""Unit tests of models.drafters.medusa: accepted files of heads, and one-line refusals."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.api.errors import ModelLoadError
from models.drafters.medusa import MedusaHeads, load_medusa

WIDTH, VOCAB = 4, 9


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    tensor: Tensor

    def read(self) -> Tensor:
        return self.tensor


def load(**weights: Tensor) -> MedusaHeads:
    stored = {name.replace("__", "."): Stored(tensor) for name, tensor in weights.items()}

    def opened(files: ExitStack) -> dict[str, Stored]:
        return stored

    source: Any = SimpleNamespace(
        where=Path("heads"),
        open=opened,
        dtype=torch.float32,
        device=torch.device("cpu"),
        model=SimpleNamespace(config=SimpleNamespace(hidden_size=WIDTH, vocab_size=VOCAB)),
    )
    return load_medusa(source)


BLOCK = {"0__0__linear__weight": torch.zeros(WIDTH, WIDTH)}


def test_heads_of_the_model_s_shapes_are_read() -> None:
    load(**BLOCK)
    load(**BLOCK, **{"0__1__weight": torch.zeros(VOCAB, WIDTH)})


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"0__0__linear__weight": torch.zeros(WIDTH, 7)}, r"weight of head 0: \[4, 7\]"),
        ({"0__0__linear__weight": torch.zeros(())}, r"weight of head 0: \[\]"),
        ({**BLOCK, "0__0__linear__bias": torch.zeros(WIDTH, 2)}, "bias of head 0"),
        ({**BLOCK, "0__1__weight": torch.zeros(VOCAB, 1)}, "output matrix of a head"),
        ({"9" * 5000 + "__0__linear__weight": torch.zeros(1)}, "weights unknown to medusa"),
        ({"9999__0__linear__weight": torch.zeros(1)}, "head 0 lacks block 0"),
    ],
)
def test_others_are_refused_in_one_line(weights: dict[str, Tensor], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        load(**weights)
