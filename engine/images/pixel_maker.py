"""PixelMaker: makes the pixel values of prompts' images, outside the step loop.

    image file --> media process (decodes, scales, cuts tiles) --> pixel values --> the request
                   may die; bounded time and memory                                 gets in line

Prompts are processed in order of arrival. Prompts with an equal image share its pixel values. Only
a few prompts have pixel values at a time, because pixel values take many more bytes than the
image's file. An image whose encoding another node has sent is not decoded. Refuses to know: queues
of requests, steps, encoders.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

from baton.api.errors import BatonError, InvalidRequestError, OverloadedError
from baton.processes.worker_processes import WorkerProcesses, WorkLimitError, WorkLimits
from engine.core.images.prompt_images import ImagePixels, PromptImages
from engine.images.media_work import read_answer

logger = logging.getLogger(__name__)

# Limits of time and memory per image. A photograph of 50 megapixels takes some seconds; decoding
# and type conversion need several copies of the image in memory.
LIMITS = WorkLimits(cpu_s=20.0, wall_s=60.0, memory_bytes=3 * 2**30)
# While the pixel values of open prompts, including those being made, take this many bytes, no
# further image is decoded.
MAX_OPEN_BYTES = 2**30
# Maximum number of bytes of pixel values that are kept for later prompts with the same image.
MAX_KEPT_BYTES = 256 * 2**20
PROCESSOR = "models.vision.preprocess:Preprocessor"
_WORK = "engine.images.media_work:make_work"

Outcome = ImagePixels | BatonError


class PixelMaker:
    """Makes pixel values of images with a checkpoint's image processor.

    Only the engine's thread calls the methods; media processes do the work.

    Args:
        model_folder: the checkpoint's folder.
        processor: class that processes files, as ``module:name``.
        limits: limits of the work on one image.
        clock: returns seconds, never going back.

    Attributes:
        on_ready: called, on any thread, when `take_ready` may return a new prompt.
    """

    def __init__(
        self,
        model_folder: Path,
        processor: str = PROCESSOR,
        limits: WorkLimits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._clock = clock
        options = {"folder": str(model_folder), "processor": processor}
        self._workers = WorkerProcesses(_WORK, options, limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[PromptImages] = deque()
        # The prompts that wait for each image being made, by the image's digest.
        self._making: dict[bytes, list[PromptImages]] = {}
        self._num_tokens: dict[bytes, int] = {}  # number of tokens of each image in `_making`
        # Largest number of bytes of pixel values per token that any image had so far; 0: no image
        # was made yet.
        self._bytes_per_token = 0.0
        self._gathered: dict[PromptImages, dict[bytes, ImagePixels]] = {}
        # The event loop's thread appends results, and the engine's thread removes them.
        self._results: deque[tuple[bytes, Outcome]] = deque()
        self._has_answered = threading.Event()
        self._ready: deque[tuple[PromptImages, BatonError | None]] = deque()
        self._alive: weakref.WeakValueDictionary[bytes, ImagePixels] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, ImagePixels] = OrderedDict()  # least recently used first

    def start(self) -> None:
        """Start the media processes, so that the first image does not wait for them.

        Raises:
            NodeUnavailableError: the processes cannot be started.
            RuntimeError: no thread is left.
        """
        asyncio.run_coroutine_threadsafe(self._start_workers(), self._start_loop()).result()

    def submit(self, images: PromptImages) -> None:
        """Start making a prompt's pixel values; a later `take_ready` returns the prompt."""
        images.asked_at = self._clock()
        self._waiting.append(images)
        self._begin_more()

    def take_ready(self) -> list[tuple[PromptImages, BatonError | None]]:
        """Return the prompts that got their pixel values, or an error, since the last call."""
        while self._results:
            self._share(*self._results.popleft())
        if self._waiting:
            self._begin_more()
        ready = list(self._ready)
        self._ready.clear()
        return ready

    @property
    def is_busy(self) -> bool:
        """Return whether `take_ready` has not yet returned all submitted prompts."""
        return bool(self._waiting or self._gathered or self._ready)

    def wait(self) -> None:
        """Wait until a media process has finished an image, if any is being made."""
        if self._making and not self._results:
            self._has_answered.wait()
        self._has_answered.clear()

    def close(self) -> None:
        """End the media processes; afterwards no image can be decoded."""
        self._workers.close()

    # ------------------------------------------------------------------ on the engine's thread

    def _begin_more(self) -> None:
        """Start processing the images of waiting prompts, as long as the memory limit allows."""
        while self._waiting and self._has_memory():
            images = self._waiting.popleft()
            if not images.users:  # all requests with this prompt have ended
                continue
            self._gathered[images] = {}
            num_tokens = {span.digest: span.num_tokens for span in images.spans}
            received, images.received = images.received, {}
            for digest, file in images.files.items():
                pixels = received.get(digest) or self._alive.get(digest)
                if pixels is not None:
                    self._gathered[images][digest] = pixels
                elif digest in self._making:
                    self._making[digest].append(images)
                else:
                    self._making[digest] = [images]
                    self._num_tokens[digest] = num_tokens[digest]
                    self._begin(digest, file)
            self._finish_if_all(images)

    def _begin(self, digest: bytes, file: bytes) -> None:
        try:
            loop = self._start_loop()
        except RuntimeError as error:
            self._results.append((digest, OverloadedError(f"images: {error}")))
            return
        asyncio.run_coroutine_threadsafe(self._make(digest, file), loop)

    def _has_memory(self) -> bool:
        """Return whether the memory limit allows another prompt to begin."""
        if self._making and not self._bytes_per_token:
            return False  # make one image first: its bytes per token are needed
        expected = sum(self._num_tokens.values()) * self._bytes_per_token
        return self._open_bytes() + expected < MAX_OPEN_BYTES

    def _open_bytes(self) -> int:
        return sum(
            pixels.num_bytes for digest, pixels in self._alive.items() if digest not in self._kept
        )

    def _share(self, digest: bytes, outcome: Outcome) -> None:
        """Pass an image's pixel values, or an error, to all prompts that wait for the image."""
        prompts, num_tokens = self._making.pop(digest), self._num_tokens.pop(digest)
        if isinstance(outcome, ImagePixels):
            size = outcome.num_bytes / num_tokens
            self._bytes_per_token = max(self._bytes_per_token, size)
            self._alive[digest] = outcome
            self._keep(digest, outcome)
        for images in prompts:
            gathered = self._gathered.get(images)
            if gathered is None:  # another image of the prompt has failed
                continue
            if isinstance(outcome, BatonError):
                del self._gathered[images]
                self._ready.append((images, error_of(images, digest, outcome)))
            else:
                gathered[digest] = outcome
                self._finish_if_all(images)

    def _finish_if_all(self, images: PromptImages) -> None:
        if len(self._gathered[images]) == len(images.files):
            images.pixels = self._gathered.pop(images)
            images.pixels_wait_s += self._clock() - images.asked_at
            self._ready.append((images, None))

    def _keep(self, digest: bytes, pixels: ImagePixels) -> None:
        """Keep pixel values for later prompts; evict the least recently used ones."""
        self._kept[digest] = pixels
        self._kept.move_to_end(digest)
        num_bytes = sum(one.num_bytes for one in self._kept.values())
        while num_bytes > MAX_KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.num_bytes

    # ------------------------------------------------------------------ on the loop's thread

    async def _start_workers(self) -> None:
        self._workers.start()

    async def _make(self, digest: bytes, file: bytes) -> None:
        outcome: Outcome
        try:
            outcome = ImagePixels(read_answer(await self._workers.run(file)))
        except WorkLimitError:
            limits = self._workers.limits
            most = f"{limits.cpu_s:g} s and {limits.memory_bytes >> 20} MiB of memory"
            outcome = InvalidRequestError("image", f"cannot be decoded within {most}")
        except BatonError as error:
            outcome = error
        except (OSError, RuntimeError) as error:
            outcome = OverloadedError(f"images: {error}")
        except Exception:  # so that no prompt with this image waits forever
            logger.exception("the pixel values of an image cannot be made")
            outcome = OverloadedError("images: a file could not be decoded here; try again")
        self._results.append((digest, outcome))
        self._has_answered.set()
        self.on_ready()

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        """Start the event loop's thread unless it runs already; it ends with this object."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="pixels", daemon=True)
            thread.start()
            weakref.finalize(self, _stop, loop, thread)
            self._loop = loop
        return self._loop


def error_of(images: PromptImages, digest: bytes, error: BatonError) -> BatonError:
    """Return a copy of an image's error that names the image by its index in this prompt."""
    if not isinstance(error, InvalidRequestError):
        return error
    index = next(i for i, span in enumerate(images.spans) if span.digest == digest)
    return InvalidRequestError(f"images[{index}]", error.problem)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
