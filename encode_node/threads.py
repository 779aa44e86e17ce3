"""EncodeThreads: runs an encode node on a thread; used from a program's asyncio thread."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future
from dataclasses import dataclass

from PIL import Image
from prometheus_client.metrics_core import Metric

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageLayout, ImageSpan, PromptImage
from baton.kv.encodings import BLOCK_TOKENS
from baton.link.words import NodeRegistration, NodeRole, StepTime
from baton.version import __version__
from encode_node.encoder import Encoder
from encode_node.node import EncodeNode
from engine.core.images.prompt_images import DIGEST_BYTES, ImagePixels, PromptImages
from engine.engine_loop import EngineLoop
from engine.images.pixel_maker import PixelMaker
from kvconnector.ends import Sender
from node_runtime.encodings.units import Units
from node_runtime.reports.collector import TransferCollector
from node_runtime.threads import ENGINE_THREAD, NodeOnThread

logger = logging.getLogger(__name__)

# Sides, in pixels, of the square images whose encoding is measured at the start.
MEASURED_SIDES = (128, 448)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEncoder:
    """A loaded encoder, and what its node tells routers about itself.

    Attributes:
        layout: the model's rule for the tokens of an image.
        engine_id: unique id of this start of the process.
        compatibility: properties that must be equal on the prefill nodes that get encodings.
    """

    encoder: Encoder
    layout: ImageLayout
    pixels: PixelMaker
    units: Units
    engine_id: str
    compatibility: dict[str, str]


class EncodeThreads(NodeOnThread[EncodeNode]):
    """An encode node and its thread; see `node_runtime.node_program.NodeProgram` for the contract.

    Args:
        name: name of the node.
        make_node: makes the node and its end of the KV connector, given a function that wakes the
            node's thread.
        on_death: called when the node cannot continue.
        on_close: called when the threads have ended.
    """

    adapters = None
    weights = None

    def __init__(
        self,
        name: str,
        loaded: LoadedEncoder,
        make_node: Callable[[Callable[[], None]], tuple[EncodeNode, Sender]],
        on_death: Callable[[Exception], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._loaded, self._on_close = name, loaded, on_close
        self._encode_times: tuple[StepTime, ...] = ()
        self._loop = EngineLoop(self._step, on_death, name=ENGINE_THREAD)
        loaded.pixels.on_ready = self._loop.wake
        self._node, self._end = make_node(self._loop.wake)
        self._loop.start()

    def compute_first_steps(self) -> Future[None]:
        def compute() -> None:
            loaded = self._loaded
            self._encode_times = measure_encode_times(
                loaded.encoder.encode, loaded.pixels, loaded.layout
            )

        return self._loop.call(compute)

    def registration(self, address: str) -> NodeRegistration:
        num_units = self._loaded.units.num_units
        return NodeRegistration(
            node_name=self._name,
            engine_id=self._loaded.engine_id,
            role=NodeRole.ENCODE,
            version=__version__,
            address=address,
            peer_info=self._end.describe(),
            compatibility=self._loaded.compatibility,
            max_model_len=num_units * BLOCK_TOKENS,
            num_blocks=num_units,
            block_size=BLOCK_TOKENS,
            encodes_images=True,
            encode_times=self._encode_times,
        )

    def flush_prefix_cache(self) -> Future[int]:
        """Drop all kept encodings; return their number."""
        return self._loop.call(self._node.store.forget_all)

    def dump(self, error: Exception) -> None:
        """Log how much work is open; an encode node has no state that is worth a dump file."""
        logger.critical("%d images are open: %s", len(self.requests()), error)

    def collector(self) -> EncodeCollector:
        return EncodeCollector(self._name, self._node, self)

    def _step(self) -> bool:
        return self._node.step()

    def close(self) -> None:
        self._loop.stop()
        self._end.close()
        self._loaded.pixels.close()
        self._on_close()


class EncodeCollector(TransferCollector):
    """The metric families of an encode node; docs/metrics.md lists them."""

    def __init__(self, name: str, node: EncodeNode, threads: EncodeThreads) -> None:
        super().__init__(NodeRole.ENCODE, name, threads)
        self._node = node

    def collect(self) -> Iterator[Metric]:
        counts, beat, store = self._node.encode_counts(), self._node.beat(), self._node.store
        gauge, counter = self._gauge, self._counter
        yield counter("images_encoded", "Images that steps encoded.", counts.images_encoded)
        yield counter(
            "encoder_cache_hits",
            "Images of prompts whose encoding was found.",
            counts.hits,
        )
        yield counter("images_refused", "Images left to prefill nodes.", counts.refused)
        yield counter("encoder_seconds", "Time in the encoder.", counts.encoder_s)
        yield gauge("images_waiting", "Images that wait for their encoding.", beat.num_waiting)
        yield gauge("encodings_kept", "Encodings kept for later prompts.", len(store))
        yield gauge("blocks", "KV blocks.", store.units.num_units)
        yield gauge("blocks_free", "KV blocks that nobody holds.", beat.num_free_blocks)
        yield from self._of_transfers()


def measure_encode_times(
    encode: Callable[[ImagePixels], Sized], pixels: PixelMaker, layout: ImageLayout
) -> tuple[StepTime, ...]:
    """Measure the seconds to encode a small and a large image; return them by rising tokens.

    Each image is encoded twice, because the first run may touch new memory. An image that the model
    cannot take is not measured. The images also show ``pixels`` how much memory pixel values take.
    """
    times: dict[int, float] = {}
    for side in MEASURED_SIDES:
        images = _gray_image(side, layout)
        if images is not None:
            pixels.submit(images)
        while pixels.is_busy:
            pixels.wait()
            pixels.take_ready()
        if images is None or images.pixels is None:
            logger.info("an image of %d pixels' width is not taken, so not measured", side)
            continue
        (found,) = images.pixels.values()
        encode(found)
        began_at = time.monotonic()
        encode(found)
        times[images.spans[0].num_tokens] = max(time.monotonic() - began_at, 1e-6)
    shown = ", ".join(f"{tokens} in {1e3 * seconds:.3g} ms" for tokens, seconds in times.items())
    logger.info("encoding of image tokens: %s", shown)
    return tuple(StepTime(tokens, times[tokens]) for tokens in sorted(times))


def _gray_image(side: int, layout: ImageLayout) -> PromptImages | None:
    """Make a prompt that has only a gray square image; None: the model cannot take the image."""
    try:
        num_tokens = len(layout.expand(side, side).token_ids)
    except InvalidRequestError:
        return None
    file = io.BytesIO()
    Image.new("RGB", (side, side), (128, 128, 128)).save(file, "PNG")
    digest = side.to_bytes(DIGEST_BYTES, "big")
    image = PromptImage(ImageSpan(0, num_tokens, digest), file.getvalue())
    images = PromptImages([image], [0] * num_tokens, 0, num_tokens)
    images.add_user("measure")
    return images
