"""ImageReader: checks a prompt's image files, and puts their tokens into the prompt.

Headers are read in worker processes, because a file may crash its parser. No pixel is decoded here;
nodes do that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.access.identity import ANYBODY, Principal
from baton.api.errors import InvalidRequestError
from baton.api.images import ImageLayout, PromptImage
from baton.media.expand import SizedFile, expand_images
from baton.media.image_header import ImageHeader
from baton.processes.worker_processes import WorkerProcesses, WorkLimitError, WorkLimits
from router.intake.cache_salts import CacheSalts
from router.intake.images.image_options import ImageOptions
from router.intake.images.open_images import OpenImages

# To read the header of a WebP file, Pillow needs two canvases of 4 bytes per pixel.
_BYTES_PER_PIXEL = 8
_LIMITS = {"cpu_s": 1.0, "wall_s": 20.0}
_read_answer = msgspec.json.Decoder(ImageHeader).decode


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file of a request.

    Attributes:
        field: the client's field that has the image, for errors.
    """

    data: bytes = field(repr=False)
    field: str


class ImageReader:
    """Reads the images of one base model's requests. Belongs to one event loop.

    Args:
        layout: gives the tokens that stand for an image in the model's prompts.
        options: limits of images; None: the defaults.
        salts: decides which prompts share the encodings of equal images.

    Attributes:
        layout, options: see the arguments.
        open: counts the bytes of image files in open requests.
    """

    def __init__(
        self,
        layout: ImageLayout,
        options: ImageOptions | None = None,
        salts: CacheSalts | None = None,
    ) -> None:
        self.layout, self._salts = layout, salts or CacheSalts()
        self.options = options or ImageOptions()
        self.open = OpenImages(self.options.max_open_image_bytes)
        limits = WorkLimits(
            **_LIMITS,
            memory_bytes=64 * 2**20
            + 2 * self.options.max_image_bytes
            + _BYTES_PER_PIXEL * self.options.max_image_pixels,
        )
        work = "baton.media.image_header:make_work"
        self._workers = WorkerProcesses(work, {}, limits, num_workers=2)

    def start(self) -> None:
        """Start the worker processes, so that the first image does not wait for them."""
        self._workers.start()

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    async def read_sizes(self, files: Sequence[ImageFile], *, caller: str = "") -> list[SizedFile]:
        """Check image files, and return them with the width and height of their images.

        Args:
            caller: the tenant whose files these are.

        Raises:
            InvalidRequestError: a file is not an image of an accepted format, or exceeds a limit.
            OverloadedError, NodeUnavailableError: raised by `WorkerProcesses.run`.
        """
        self.options.check_count(files[-1].field, len(files))
        num_before = 0
        for file in files:
            self.options.check_bytes(file.field, len(file.data), num_before)
            num_before += len(file.data)
        sized = []
        for file in files:
            header = await self._read_header(file, caller)
            self.options.check_size(file.field, header.width, header.height)
            sized.append((file.data, header.width, header.height))
        return sized

    async def expand(
        self,
        token_ids: Sequence[int],
        sized: Sequence[SizedFile],
        principal: Principal = ANYBODY,
        cache_word: str = "",
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Replace a prompt's image markers by the images' tokens; see `expand_images`.

        Args:
            principal: the client of the prompt; it shares encodings only with its group.
            cache_word: the client's ``cache_salt``.
        """
        salt = self._salts.of(principal, cache_word)
        # Run in a thread beside the event loop: hashing 16 MiB takes 20 ms, and releases the GIL.
        return await asyncio.to_thread(expand_images, token_ids, sized, self.layout, salt)

    async def _read_header(self, file: ImageFile, caller: str) -> ImageHeader:
        try:
            return _read_answer(await self._workers.run(file.data, caller=caller))
        except InvalidRequestError as error:
            raise error.of_field(file.field) from None
        except WorkLimitError as error:
            raise InvalidRequestError(file.field, f"the image {error} to be read") from None


def check_markers(messages: Sequence[Mapping[str, Any]], layout: ImageLayout) -> None:
    """Raise InvalidRequestError if a text contains the marker that stands for an image.

    Args:
        messages: the messages of a conversation, whose contents are texts or parts.
    """
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        if any(layout.marker in (part.get("text") or "") for part in parts):
            raise InvalidRequestError(
                f"messages[{index}].content",
                f"must not have {layout.marker}, which stands for an image",
            )
