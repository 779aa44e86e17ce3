"""ImageInputs: an engine's way from image files to prompts that can be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.api.errors import BatonError
from baton.api.images import ImageLayout, PromptImage
from engine.core.images.prompt_images import PromptImages
from engine.images.pixel_maker import PixelMaker


class ImageInputs:
    """The images of one engine's prompts.

    Args:
        layout: the model's rule for the tokens of an image.
        pixels: makes pixel values.
        most_tokens: most tokens of one image.

    Attributes:
        layout: the argument, unchanged.
    """

    def __init__(self, layout: ImageLayout, pixels: PixelMaker, most_tokens: int) -> None:
        self.layout = layout
        self._pixels, self._most_tokens = pixels, most_tokens

    @property
    def is_busy(self) -> bool:
        """Return whether some prompt waits for pixel values."""
        return self._pixels.is_busy

    def of_prompt(self, images: Sequence[PromptImage], token_ids: Sequence[int]) -> PromptImages:
        """Return the images of a prompt, checked; raises InvalidRequestError."""
        placeholder = self.layout.placeholder_token_id
        return PromptImages(images, token_ids, placeholder, self._most_tokens)

    def start(self) -> None:
        """Start the media processes; see `PixelMaker.start`."""
        self._pixels.start()

    def submit(self, images: PromptImages) -> None:
        """Make pixel values; see `PixelMaker.submit`."""
        self._pixels.submit(images)

    def take_ready(self) -> list[tuple[PromptImages, BatonError | None]]:
        """Return the prompts with pixel values; see `PixelMaker.take_ready`."""
        return self._pixels.take_ready()

    def wait(self) -> None:
        """Wait until `take_ready` may have something new."""
        self._pixels.wait()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, when `take_ready` has something new."""
        self._pixels.on_ready = wake

    def close(self) -> None:
        """End the media processes."""
        self._pixels.close()
