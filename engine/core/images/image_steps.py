"""ImageSteps: chooses the images that each step encodes, and cuts prompt chunks to fit.

    prompt    [ text | image 1 ....... | text | image 2 ....... | text ]
                  computed ...|<- chunk ------->|
                                            ^ image 2 has no encoding, and the step cannot make it:
                                              the chunk ends here

A chunk with tokens of an image needs the image's encoding, either from the cache or made in the
chunk's step. The number of image tokens that a step encodes is limited. A chunk may end within an
image if attention is causal; the encoding is held until the image's last token has been computed.
If the tokens of an image attend to each other in both directions, one chunk computes all of them. A
cached prefix may still end within such an image, because its blocks were computed with the whole
image; one chunk computes the rest. Refuses to know: tensors, how requests are chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.api.errors import BatonError, InvalidRequestError, OverloadedError
from baton.api.images import ImageSpan
from engine.core.images.encoder_cache import EncoderCache
from engine.core.images.image_plan import NO_MEMORY, EncodeImage, PlacedImage, StepImages
from engine.core.images.prompt_images import PromptImages
from engine.core.metrics import EngineCounters
from engine.core.outputs import ScheduledRequest
from engine.core.request import Request
from engine.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of the images in one engine's steps.

    Attributes:
        cache_tokens: maximum number of tokens of all encodings that the workers keep; 0: the model
            takes no images.
        max_encoder_tokens: maximum number of tokens of the images that one step encodes. One image
            may have more.
        keeps_whole: whether no chunk may end within an image, because the image's tokens attend to
            each other in both directions.
    """

    cache_tokens: int = 0
    max_encoder_tokens: int = 0
    keeps_whole: bool = False


NO_IMAGES = ImageLimits()


class ImageSteps:
    """Chooses the images that each step encodes.

    Args:
        limits: the limits of a step.
        counters: counts encoded images and hits of the encoder cache.

    Attributes:
        cache: the workers' encodings.
        wanted: prompts' images whose pixel values must be made again; the reader of this list
            empties it.
    """

    def __init__(self, limits: ImageLimits, counters: EngineCounters) -> None:
        self.cache = EncoderCache(limits.cache_tokens)
        self.wanted: list[PromptImages] = []
        self._max_encoder_tokens, self._counters = limits.max_encoder_tokens, counters
        self._keeps_whole = limits.keeps_whole
        self._num_tokens_left = limits.max_encoder_tokens
        self._encodes_any = False
        self._num_open = 0  # number of open requests with images
        # Encodings that the next step releases: (digest of the image, holder).
        self._computed: list[tuple[bytes, tuple[str, int]]] = []
        # What to encode and to drop since the latest plan. A scheduled step may be given up before
        # it is planned, so the next plan then contains its changes, too.
        self._encode: dict[bytes, EncodeImage] = {}
        self._forget: list[bytes] = []

    @property
    def is_active(self) -> bool:
        """Return whether a step may have work with images; if not, callers can skip this object."""
        return bool(self._num_open or self._forget)

    # ------------------------------------------------------------------ requests

    def register(self, request: Request) -> None:
        """Register a new request; ignore one without images."""
        if request.images is not None:
            self._num_open += 1
            request.images.add_user(request.request_id)

    def leave_batch(self, request: Request) -> None:
        """Release the encodings of a preempted or ending request."""
        self.cache.release_all(request.request_id)

    def unregister(self, request: Request) -> None:
        """Unregister an ended request; ignore one without images."""
        if request.images is not None:
            self._num_open -= 1
            request.images.remove_user(request.request_id)

    def start_again(self, request: Request) -> None:
        """Ask for the pixel values of a preempted request's images again, if they were dropped."""
        if request.images is not None:
            request.images.add_user(request.request_id)
            if request.images.awaits_pixels:
                self.wanted.append(request.images)

    def note_computed(self, request: Request) -> None:
        """Drop pixel values that no open request needs; call when prompt tokens are computed."""
        images = request.images
        if images is not None and request.num_computed_tokens >= images.end:
            images.remove_user(request.request_id)

    def forget_all(self) -> None:
        """Drop all encodings, which the workers may have lost; call while no request is open."""
        self._encode.clear()
        for digest in list(self.cache):
            self.cache.remove(digest)
            self._forget.append(digest)

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """Begin to schedule a step; release the encodings that earlier steps have used."""
        if not self.is_active:
            return
        for digest, holder in self._computed:
            self.cache.release(digest, holder)
        self._computed.clear()
        # A step that was given up may have left images that this step must still encode.
        for digest in [digest for digest in self._encode if not self.cache.is_held(digest)]:
            self.cache.remove(digest)
            del self._encode[digest]
        self._num_tokens_left = self._max_encoder_tokens
        left = [digest for digest, image in self._encode.items() if not image.is_encoded]
        self._num_tokens_left -= sum(map(self.cache.size_of, left))
        self._encodes_any = bool(left)

    def limit(self, request: Request, num_tokens: int, most: int) -> int:
        """Return how many of a request's next tokens this step can compute.

        Args:
            num_tokens: tokens that the request should compute. More are returned only if an image
                begins the chunk and must be computed whole.
            most: tokens that fit into the step.
        """
        start = request.num_computed_tokens + request.num_tokens_in_flight
        needed: dict[bytes, int] = {}  # sizes of the images whose encodings are not kept
        to_encode = 0  # tokens of the images that this step must encode
        used: list[bytes] = []
        if request.images is None or start >= request.images.end or num_tokens < 1:
            return num_tokens
        if self._keeps_whole:
            num_tokens = _without_cut(request, start, num_tokens, most)
        for span in _spans_between(request, start, start + num_tokens):
            used.append(span.digest)
            if span.digest not in self.cache and span.digest not in needed:
                needed[span.digest] = span.num_tokens
                to_encode += 0 if _is_encoded(request.images, span) else span.num_tokens
            if not needed:
                continue
            num_needed = sum(needed.values())
            is_first = not self._encodes_any and len(needed) == 1
            in_budget = is_first or to_encode <= self._num_tokens_left
            if not in_budget or not self.cache.has_room(num_needed, used):
                return max(span.first - start, 0)
        return num_tokens

    def add(self, request: Request, num_tokens: int) -> None:
        """Add a request's next tokens to the step; `limit` has allowed them."""
        images = request.images
        assert images is not None
        start = request.num_computed_tokens + request.num_tokens_in_flight
        end = start + num_tokens
        missing: list[int] = []
        for index, span in enumerate(images.spans):
            if span.end <= start or span.first >= end:
                continue
            holder = (request.request_id, span.first)
            if not self.cache.hold(span.digest, holder):
                missing.append(index)
            elif span.first >= start:
                self._counters.encoder_cache_hits += 1
                request.num_encodings_cached += 1
            if span.end <= end:
                self._computed.append((span.digest, holder))
        for index in missing:  # last, because new encodings may evict free encodings
            span = images.spans[index]
            holder = (request.request_id, span.first)
            # An image that comes twice in the prompt is in the cache the second time.
            if not self.cache.hold(span.digest, holder):
                self._encode_image(request, images, index)

    def add_to(self, plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
        """Add to a step's plan the images to encode and to place; call once per planned step."""
        return replace(plan, images=self.plan(scheduled)) if self.is_active else plan

    def plan(self, scheduled: Sequence[ScheduledRequest]) -> StepImages | None:
        """Return the images that a planned step encodes, places and drops; None if it has none.

        Call once per planned step.
        """
        placed: list[PlacedImage] = []
        row = 0  # the step's row of the request's first scheduled token
        for item in scheduled:
            request, num_tokens = item.request, item.num_scheduled_tokens
            if request.images is not None:
                start = request.num_computed_tokens + request.num_tokens_in_flight
                placed += _placed(request.images, start, start + num_tokens, row - start)
            row += num_tokens
        if not placed and not self._encode and not self._forget:
            return None
        step = StepImages(tuple(self._forget), tuple(self._encode.values()), tuple(placed))
        self._encode.clear()
        self._forget.clear()
        return step

    def failures(
        self, failed: Mapping[bytes, str], requests: Iterable[Request]
    ) -> Iterator[tuple[Request, BatonError]]:
        """Drop encodings that the workers could not make; yield their requests, with errors.

        Args:
            failed: by digest of an image, why it could not be encoded.
            requests: all requests that have not ended.
        """
        if not failed:
            return
        for digest in failed:
            self.cache.remove(digest)
            self._encode.pop(digest, None)
            self._forget.append(digest)  # a step in flight may have encoded the image again
        for request in requests:
            for index, span in enumerate(request.image_spans):
                if span.digest in failed and request.num_computed_tokens < span.end:
                    yield request, _error_of(f"images[{index}]", failed[span.digest])
                    break

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariants; for tests and debug runs.

        Args:
            requests: all requests that have not ended.
        """
        self.cache.check()
        assert self._num_open == sum(request.images is not None for request in requests)
        assert set(self._encode) <= set(self.cache)
        assert not set(self._forget) & (set(self.cache) - set(self._encode))

    def _encode_image(self, request: Request, images: PromptImages, index: int) -> None:
        span = images.spans[index]
        holder = (request.request_id, span.first)
        assert images.pixels is not None, "a request without pixel values is not scheduled"
        for digest in self.cache.add(span.digest, span.num_tokens, holder):
            if self._encode.pop(digest, None) is None:  # the encoding was made, or is being made
                self._forget.append(digest)
        self._encode[span.digest] = EncodeImage(
            span.digest, len(images.places[index]), images.pixels[span.digest].arrays
        )
        if _is_encoded(images, span):
            self._counters.encodings_received += 1
            return
        self._num_tokens_left -= span.num_tokens
        self._encodes_any = True
        self._counters.images_encoded += 1
        request.num_images_encoded += 1


def _error_of(field: str, problem: str) -> BatonError:
    """Return the error of a request with an image that was not encoded."""
    if problem == NO_MEMORY:  # not the image's fault
        return OverloadedError(f"{field}: {problem}")
    return InvalidRequestError(field, problem)


def _is_encoded(images: PromptImages, span: ImageSpan) -> bool:
    """Return whether another node has encoded an image."""
    pixels = None if images.pixels is None else images.pixels.get(span.digest)
    return pixels is not None and pixels.is_encoding


def _spans_between(request: Request, start: int, end: int) -> list[ImageSpan]:
    """Return the images with placeholders between positions ``start`` and ``end`` of a prompt."""
    assert request.images is not None
    return [span for span in request.images.spans if span.first < end and span.end > start]


def _without_cut(request: Request, start: int, num_tokens: int, most: int) -> int:
    """Return a number of tokens from ``start`` on that does not end within an image.

    A chunk that would end within an image ends before it. If the chunk begins with the image, or
    within it after a cached prefix, the chunk has the whole rest of the image. If ``most`` is too
    small for the rest, the number is 0, and the request waits for a step with more room.
    """
    end = start + num_tokens
    for span in _spans_between(request, start, end):
        if span.end <= end:
            continue
        if span.first > start:
            return span.first - start
        return span.end - start if span.end - start <= most else 0
    return num_tokens


def _placed(images: PromptImages, start: int, end: int, shift: int) -> list[PlacedImage]:
    """Return the encodings needed by the prompt tokens from position ``start`` to before ``end``.

    Args:
        shift: a token's row in the step minus its position in the prompt.
    """
    placed = []
    for span, places in zip(images.spans, images.places, strict=True):
        if span.end <= start or span.first >= end:
            continue
        first, last = bisect_left(places, start), bisect_left(places, end)
        if first < last:
            rows = [place + shift for place in places[first:last]]
            placed.append(PlacedImage(span.digest, rows, first))
    return placed
