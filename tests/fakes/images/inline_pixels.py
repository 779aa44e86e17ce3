"""Pixel values made in the test's own process, which saves the start of media processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from baton.api.errors import BatonError
from engine.core.images.prompt_images import ImagePixels, PromptImages
from engine.engine import Engine
from engine.images.media_work import read_answer, work_of
from engine.images.pixel_maker import PixelMaker, error_of
from models.vision.preprocess import Preprocessor


class InlinePixels(PixelMaker):
    """A `PixelMaker` that makes pixel values at once.

    Attributes:
        num_made: number of images that were decoded.
    """

    def __init__(self, pixels: Callable[[bytes], Mapping[str, np.ndarray[Any, Any]]]) -> None:
        self.num_made = 0
        self._work = work_of(pixels)
        self._done: list[tuple[PromptImages, BatonError | None]] = []

    def submit(self, images: PromptImages) -> None:
        made: dict[bytes, ImagePixels] = {}
        for digest, file in images.files.items():
            try:
                made[digest] = images.received.get(digest) or self._made(file)
            except BatonError as error:
                self._done.append((images, error_of(images, digest, error)))
                return
        images.pixels = made
        self._done.append((images, None))

    def take_ready(self) -> list[tuple[PromptImages, BatonError | None]]:
        done, self._done = self._done, []
        return done

    @property
    def is_busy(self) -> bool:
        return bool(self._done)

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def _made(self, file: bytes) -> ImagePixels:
        self.num_made += 1
        return ImagePixels(read_answer(self._work(file)))


def decode_inline(engine: Engine, preprocessor: Preprocessor) -> None:
    """Let an engine's images be decoded in this process."""
    assert engine.features.images.are_taken
    engine.features.images._pixels = InlinePixels(preprocessor.pixels)
