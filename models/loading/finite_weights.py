"""Checks that all numbers of a checkpoint are finite. Refuses to know: modules."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from baton.api.errors import ModelLoadError
from models.config import ModelConfig
from models.loading.loader import open_weights
from models.loading.stored_weights import StoredTensor, WeightPart


def check_finite(folder: Path, config: ModelConfig) -> None:
    """Raise ModelLoadError if a tensor has a NaN or an infinite number.

    Reads all weights of the folder, a piece at a time.
    """
    with ExitStack() as files:
        for stored in open_weights(folder, config, files).values():
            if not _is_finite(stored):
                problem = "has a number that is NaN or infinite; all must be finite"
                raise ModelLoadError(f"{stored.path}: {stored.name}: {problem}")


def _is_finite(stored: StoredTensor) -> bool:
    tensor = stored.read()
    if not tensor.is_floating_point():
        return True
    part = WeightPart(0, tensor.reshape(-1), stored.is_mapped)
    return all(bool(numbers.float().isfinite().all()) for _, numbers in part.pieces())
