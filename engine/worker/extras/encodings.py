"""Encodings: keeps a worker's image encodings, and finds the tokens of a step that read them.

Refuses to know: prompts, when an encoding may be dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
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
from models.parallel.group import ALONE, Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadImages:
    """The encodings that a step reads, and the images that it could not encode.

    Attributes:
        rows: for each placed encoding, the step's tokens that read it, and their embeddings.
        failed: by digest of an image, why it was not encoded. On the leader, these include the
            failures of all ranks.
        seconds: seconds spent on encoding.
    """

    rows: tuple[ImageRows, ...] = ()
    failed: Mapping[bytes, str] = field(default_factory=dict)
    seconds: float = 0.0


class Encodings:
    """Encodes images, and keeps and drops encodings, as the plans of steps say.

    Used by one thread at a time.

    Encodings that another node has made are checked and kept, too.

    Args:
        model: the model, with its encoder of images.
        device: device of the model.
        ranks: the ranks that share the model, each of which encodes every image.
    """

    def __init__(self, model: CausalLM, device: torch.device, ranks: Ranks = ALONE) -> None:
        self._model, self._device = model, device
        self._everyone, self._leader = ranks.everyone, ranks.leader
        self._kept: dict[bytes, Tensor] = {}  # each [num_embeddings, width]

    def __len__(self) -> int:
        """Return the number of kept encodings."""
        return len(self._kept)

    def read(self, step: StepImages) -> ReadImages:
        """Drop and make the encodings that a step's plan names.

        Return the encodings that the step's forward reads. If the step encodes images, the leader
        waits until all ranks have encoded them.
        """
        for digest in step.forget:
            self._kept.pop(digest, None)  # an image that could not be encoded has no entry
        began_at = time.monotonic()
        failed = dict[bytes, str]()
        for image in step.encode:
            if problem := self._encode(image):
                failed[image.digest] = problem
        if step.encode and self._everyone.size > 1:
            self._exchange(step.encode, failed)
        seconds = time.monotonic() - began_at if step.encode else 0.0
        placed = [one for one in step.placed if one.digest in self._kept]
        # After this step, the scheduler ends the requests of images that could not be encoded, or
        # that have no encoding.
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

    def _exchange(self, images: Sequence[EncodeImage], failed: dict[bytes, str]) -> None:
        """Tell the leader which images this rank failed to encode; on the leader, add these.

        The other ranks need no answer: the leader's failures end the requests of an image, whatever
        the other ranks have computed for these requests. The messages go from rank to leader only,
        so that no pipeline stage waits for a later stage.
        """
        if self._everyone.rank != self._leader:
            flags = [int(image.digest in failed) for image in images]
            self._everyone.send(torch.tensor(flags, device=self._device), self._leader)
            return
        for rank in range(self._everyone.size):
            if rank == self._leader:
                continue
            received = torch.zeros(len(images), dtype=torch.int64, device=self._device)
            for image, flag in zip(
                images, self._everyone.receive(received, rank).tolist(), strict=True
            ):
                if flag:
                    failed.setdefault(image.digest, f"rank {rank} could not encode the image")

    def _rows_of(self, placed: PlacedImage) -> ImageRows:
        embeddings = self._kept[placed.digest][placed.first : placed.first + len(placed.rows)]
        return ImageRows(torch.tensor(placed.rows, device=self._device), embeddings)

    def _to_tensor(self, array: PixelArray) -> Tensor:
        """Return the array as a tensor on the device, in the array's dtype."""
        data = bytearray(array.data)  # torch needs a writable buffer
        if array.name == ENCODING:  # may be bfloat16, which NumPy lacks
            numbers = torch.frombuffer(data, dtype=getattr(torch, array.dtype))
        else:
            numbers = torch.from_numpy(np.frombuffer(data, dtype=array.dtype))
        return numbers.reshape(array.shape).to(self._device)
