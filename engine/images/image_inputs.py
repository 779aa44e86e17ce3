"""ImageInputs: checks the images of prompts, and has them decoded before requests are scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from baton.api.errors import BatonError, InvalidRequestError
from baton.api.images import ImageLayout, ImageSpan, PromptImage
from engine.core.images.prompt_images import PromptImages
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.scheduler import Scheduler
from engine.images.pixel_maker import PixelMaker

_NO_IMAGES = "are not computed here: this model is text only"


class ImageInputs:
    """The intake of images of one engine.

    Args:
        layout: maps an image to the model's tokens; None: the model takes no images.
        pixels: makes pixel values; None: the model takes no images.
        most_tokens: maximum number of tokens that one image may have.
        most_in_a_step: maximum number of tokens of one image, if one step must compute the whole
            image; None if several steps may compute it.
        has_three_axes: whether the model computes positions from the grids of images.

    Attributes:
        layout: the argument, unchanged.
    """

    def __init__(
        self,
        layout: ImageLayout | None = None,
        pixels: PixelMaker | None = None,
        most_tokens: int = 0,
        most_in_a_step: int | None = None,
        has_three_axes: bool = False,
    ) -> None:
        self.layout, self._has_three_axes = layout, has_three_axes
        self._pixels, self._most_tokens = pixels, most_tokens
        self._most_in_a_step = most_in_a_step

    @property
    def are_taken(self) -> bool:
        """Return whether the model takes images."""
        return self._pixels is not None

    @property
    def is_busy(self) -> bool:
        """Return whether some request waits for its images to be decoded."""
        return self._pixels is not None and self._pixels.is_busy

    def of_prompt(
        self, images: Sequence[PromptImage], token_ids: Sequence[int], *, need_files: bool = False
    ) -> PromptImages | None:
        """Check the images of a prompt and return them; None: the prompt has no images.

        Args:
            need_files: whether every image must have its file, because this engine encodes the
                images.

        Raises InvalidRequestError.
        """
        if not images:
            return None
        if self.layout is None:
            raise InvalidRequestError("images", _NO_IMAGES)
        placeholder = self.layout.placeholder_token_id
        found = PromptImages(images, token_ids, placeholder, self._most_tokens)
        if need_files and not found.files:
            raise InvalidRequestError("images", "came without files to the node that encodes them")
        if self._has_three_axes:
            _check_grids(found.spans)
        if self._most_in_a_step is not None and found.files:
            _check_steps(found.spans, self._most_in_a_step)
        return found

    def start(self) -> None:
        """Start the processes that decode images, if the model takes images.

        Raises:
            NodeUnavailableError: the processes cannot be started.
        """
        if self._pixels is not None:
            self._pixels.start()

    def submit(self, images: PromptImages) -> None:
        """Start decoding the images of a prompt; a later `pass_on` lets its requests continue."""
        assert self._pixels is not None, "`of_prompt` refuses images"
        self._pixels.submit(images)

    def pass_on(self, scheduler: Scheduler) -> None:
        """Pass decoded images to the scheduler; decode again the images that it needs again."""
        if self._pixels is None:
            return
        for images, error in self._pixels.take_ready():
            set_pixels(scheduler, images, error)
        wanted, scheduler.images.wanted = scheduler.images.wanted, []
        for images in wanted:
            self._pixels.submit(images)

    def note_step(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, scheduler: Scheduler
    ) -> None:
        """End requests whose images a step could not encode; count the time of its encodings."""
        if output.encoding_s:
            scheduler.counters.encoder_s += output.encoding_s
            for item in scheduled.scheduled:
                item.request.encoder_s += output.encoding_s
        fail_images(scheduler, output.failed_images)

    def wait(self) -> None:
        """Wait until some image is decoded, if any is being decoded."""
        if self._pixels is not None:
            self._pixels.wait()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Set a function to call, on any thread, when images are decoded."""
        if self._pixels is not None:
            self._pixels.on_ready = wake

    def close(self) -> None:
        """End the processes that decode images."""
        if self._pixels is not None:
            self._pixels.close()


def _check_grids(spans: Sequence[ImageSpan]) -> None:
    """Raise InvalidRequestError if an image's grid has more or fewer cells than tokens."""
    for index, span in enumerate(spans):
        if min(span.grid) < 1 or math.prod(span.grid) != span.num_tokens:
            cells = " x ".join(map(str, span.grid))
            problem = f"its grid {cells} must have its number of tokens, {span.num_tokens}"
            raise InvalidRequestError(f"images[{index}]", problem)


def _check_steps(spans: Sequence[ImageSpan], most: int) -> None:
    """Raise InvalidRequestError if an image has more tokens than a step can compute."""
    for index, span in enumerate(spans):
        if span.num_tokens > most:
            limit = "max_num_batched_tokens - max_num_requests + 1"
            problem = f"has {span.num_tokens} tokens, of which a step fits at most {most} ({limit})"
            raise InvalidRequestError(f"images[{index}]", problem)


def set_pixels(scheduler: Scheduler, images: PromptImages, error: BatonError | None = None) -> None:
    """Let the requests that wait for these images go on, or end the requests with an error."""
    for request in list(scheduler.requests.values()):
        if request.images is not images:
            continue
        if error is not None:
            scheduler.fail(request, error)
        else:
            scheduler.resume(request)


def fail_images(scheduler: Scheduler, failed: Mapping[bytes, str]) -> None:
    """End the requests whose images the workers could not encode.

    Call this before `Scheduler.update`, which then ignores the step's results for these requests.

    Args:
        failed: by digest of an image, why it could not be encoded.
    """
    for request, error in scheduler.images.failures(failed, list(scheduler.requests.values())):
        scheduler.fail(request, error)
