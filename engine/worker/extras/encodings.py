"""Encodings: a worker's image encodings, and the tokens of a step that they replace.

Refuses to know: prompts, when an encoding may be dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.core.images.image_plan import (
    ENCODING,
    EncodeImage,
    PixelArray,
    PlacedImage,
    StepImages,
)
from models.base import CausalLM, ImageRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadImages:
    """The result of a step's work on images.

    Attributes:
        rows: tokens of the step whose embeddings come from encodings.
        failed: why an image was not encoded, by digest.
        seconds: time spent on encoding.
    """

    rows: tuple[ImageRows, ...] = ()
    failed: Mapping[bytes, str] = field(default_factory=dict)
    seconds: float = 0.0


class Encodings:
    """Encodes images, and keeps and drops encodings, as steps' plans say.

    Used by one thread at a time.

    An encoding that another node has made is checked and kept like the others.

    Args:
        model: the model, with its encoder of images.
        device: device of the model.
    """

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self._model, self._device = model, device
        self._kept: dict[bytes, Tensor] = {}  # each [num_embeddings, width]

    def __len__(self) -> int:
        """Return the number of kept encodings."""
        return len(self._kept)

    def read(self, step: StepImages) -> ReadImages:
        """Drop and make encodings as planned.

        Return the encodings that the step's forward reads.
        """
        for digest in step.forget:
            self._kept.pop(digest, None)  # missing if the image could not be encoded
        began_at = time.monotonic()
        failed = dict[bytes, str]()
        for image in step.encode:
            if problem := self._encode(image):
                failed[image.digest] = problem
        seconds = time.monotonic() - began_at if step.encode else 0.0
        placed = [one for one in step.placed if one.digest in self._kept]
        # A request whose image has failed, or is missing, ends after this step.
        for one in step.placed:
            if one.digest not in self._kept:
                failed.setdefault(one.digest, "its encoding is missing")
        return ReadImages(tuple(map(self._rows_of, placed)), failed, seconds)

    def _encode(self, image: EncodeImage) -> str:
        """Encode an image and keep the encoding; return why that failed, or an empty text."""
        encoder = self._model.vision
        if encoder is None:
            return "this model has no encoder of images"
        try:
            pixels = {array.name: self._to_tensor(array) for array in image.pixels}
            embeddings = pixels.get(ENCODING)  # [num_embeddings, width]
            if embeddings is None:
                embeddings = encoder.encode(pixels)
        except (RuntimeError, ValueError, IndexError) as error:
            # One client's image must not end the engine, which also serves other clients.
            logger.exception("an image cannot be encoded")
            return f"the encoder failed: {type(error).__name__}"
        if len(embeddings) != image.num_embeddings:
            found, wanted = len(embeddings), image.num_embeddings
            return f"the encoder made {found} embeddings, but the prompt has room for {wanted}"
        if not bool(embeddings.isfinite().all()):
            return "its encoding has NaN or infinite numbers"
        self._kept[image.digest] = embeddings
        return ""

    def _rows_of(self, placed: PlacedImage) -> ImageRows:
        embeddings = self._kept[placed.digest][placed.first : placed.first + len(placed.rows)]
        return ImageRows(torch.tensor(placed.rows, device=self._device), embeddings)

    def _to_tensor(self, array: PixelArray) -> Tensor:
        """Return an array's numbers on the device, in their own dtype."""
        data = bytearray(array.data)  # torch needs it writable
        if array.name == ENCODING:  # NumPy has no bfloat16
            numbers = torch.frombuffer(data, dtype=getattr(torch, array.dtype))
        else:
            numbers = torch.from_numpy(np.frombuffer(data, dtype=array.dtype))
        return numbers.reshape(array.shape).to(self._device)
