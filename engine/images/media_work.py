"""The work of a media process: turn an image file into the pixel values that the model reads."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.processes.worker_template import Work
from engine.core.images.image_plan import PixelArray

Pixels = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[PixelArray, ...])


def make_work(options: Mapping[str, str]) -> Work:
    """Load a checkpoint's image processor; return the function that processes files.

    Args:
        options: ``folder``, the checkpoint's folder, and ``processor``, the class of the processor
            as ``module:name``.
    """
    module, _, name = options["processor"].partition(":")
    processor = getattr(importlib.import_module(module), name)(Path(options["folder"]))
    return work_of(processor.pixels)


def work_of(make_pixels: Callable[[bytes], Pixels]) -> Work:
    """Return the function that turns an image file into the bytes of its pixel values.

    Args:
        make_pixels: makes the pixel values of one image file; raises InvalidRequestError if the
            file cannot be decoded.
    """

    def work(file: bytes) -> bytes:
        arrays = make_pixels(file)
        return _ENCODER.encode(tuple(_plain(name, array) for name, array in arrays.items()))

    return work


def read_answer(answer: bytes) -> tuple[PixelArray, ...]:
    """Decode the answer of a media process into pixel values."""
    return _DECODER.decode(answer)


def _plain(name: str, array: np.ndarray[Any, np.dtype[Any]]) -> PixelArray:
    return PixelArray(name, array.dtype.name, array.shape, array.tobytes())
