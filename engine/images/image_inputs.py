"""ImageInputs: has a prompt's image files decoded before its request is scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageLayout, PromptImage
from engine.core.images.prompt_images import PromptImages
from engine.core.scheduler import Scheduler
from engine.images.pixel_maker import PixelMaker

_NO_IMAGES = "are not computed here: this model is text only"


class ImageInputs:
    """The images of one engine's prompts.

    Args:
        layout: the rule by which the model maps an image to tokens; None: the model takes no
            images.
        pixels: makes pixel values; None: the model takes no images.
        most_tokens: maximum number of tokens of one image.

    Attributes:
        layout: the argument, unchanged.
    """

    def __init__(
        self,
        layout: ImageLayout | None = None,
        pixels: PixelMaker | None = None,
        most_tokens: int = 0,
    ) -> None:
        self.layout = layout
        self._pixels, self._most_tokens = pixels, most_tokens

    @property
    def are_taken(self) -> bool:
        """Return whether the model takes images."""
        return self._pixels is not None

    @property
    def is_busy(self) -> bool:
        """Return whether some request waits until its images are decoded."""
        return self._pixels is not None and self._pixels.is_busy

    def of_prompt(
        self, images: Sequence[PromptImage], token_ids: Sequence[int]
    ) -> PromptImages | None:
        """Check a future request's images and return them; None: the prompt has none.

        Raises InvalidRequestError.
        """
        if not images:
            return None
        if self.layout is None:
            raise InvalidRequestError("images", _NO_IMAGES)
        placeholder = self.layout.placeholder_token_id
        return PromptImages(images, token_ids, placeholder, self._most_tokens)

    def start(self) -> None:
        """Start the processes that decode images, if the model takes images.

        Raises:
            NodeUnavailableError: the processes cannot be started.
        """
        if self._pixels is not None:
            self._pixels.start()

    def submit(self, images: PromptImages) -> None:
        """Start decoding images; a later `pass_on` lets their requests continue."""
        assert self._pixels is not None, "`of_prompt` refuses images"
        self._pixels.submit(images)

    def pass_on(self, scheduler: Scheduler) -> None:
        """Pass decoded images to the scheduler; decode images again that it needs again."""
        if self._pixels is None:
            return
        for images, error in self._pixels.take_ready():
            scheduler.set_pixels(images, error)
        wanted, scheduler.images.wanted = scheduler.images.wanted, []
        for images in wanted:
            self._pixels.submit(images)

    def wait(self) -> None:
        """Wait until some request's images may have been decoded."""
        if self._pixels is not None:
            self._pixels.wait()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Set a function to call, on any thread, when images are decoded."""
        if self._pixels is not None:
            self._pixels.on_ready = wake

    def close(self) -> None:
        """End the decoding processes."""
        if self._pixels is not None:
            self._pixels.close()
