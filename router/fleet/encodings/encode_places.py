"""EncodePlaces: decides which node encodes each image of a prompt.

    encoding kept on the prefill node     nobody encodes the image
    encoding kept on an encode node       this node sends its encoding
    else                                  the node with the lowest cost in seconds encodes

Each node manages its own cache of encodings; the router only remembers where images were encoded
lately. If the router is wrong, the prefill node encodes what is missing, which only costs time.
`EncodePlaces` knows neither links nor attempts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from baton.api.images import PromptImage
from baton.api.outputs import PrefillReceipt
from baton.engine_config import DEFAULT_ENCODER_CACHE_TOKENS
from baton.link.words import NodeRole, StepTime
from router.fleet.node import Node

# Encoding on a prefill node also delays the other prompts there, now and in the next seconds, so
# its seconds are multiplied by this factor.
HOLD_FACTOR = 8.0
# An encode node whose encodings did not arrive gets no images for this many seconds.
BARRED_S = 5.0
# Assumed seconds per image token for a node that has not measured its encoder.
DEFAULT_S_PER_TOKEN = 1e-3


@dataclass(slots=True)
class EncodePlan:
    """Where the images of one attempt are encoded.

    Attributes:
        epoch: number of the attempt.
        prefill_engine_id: the attempt's prefill node.
        engine_ids: engine id of each image's encode node; empty: the prefill node encodes it.
        by_node: the images that each encode node must encode.
        expected_s: seconds in which the encode nodes should have sent all encodings.
    """

    epoch: int
    prefill_engine_id: str
    engine_ids: tuple[str, ...]
    by_node: list[tuple[Node, tuple[PromptImage, ...]]] = field(default_factory=list)
    expected_s: float = 0.0


class EncodePlaces:
    """Remembers for each node which encodings it keeps, and how much encoding work is open there.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}  # by engine id
        # For each engine id: seconds of open encoding work, by the attempt's epoch
        self._open: dict[str, dict[int, float]] = {}
        # For each engine id: until when the node gets no images
        self._barred: dict[str, float] = {}

    def plan(
        self,
        images: Sequence[PromptImage],
        prefill: Node,
        nodes: Sequence[Node],
        num_cached_tokens: int,
        epoch: int,
    ) -> EncodePlan | None:
        """Choose where an attempt's images are encoded; return None if no encode node can be used.

        Args:
            nodes: encode nodes that reach the prefill node.
            num_cached_tokens: number of leading prompt tokens that the prefill node has in its
                cache and does not compute.
        """
        now = self._clock()
        usable = [node for node in nodes if self._barred.get(node.engine_id, now) <= now]
        if not usable:
            return None
        chosen: dict[bytes, Node | None] = {}
        for image in images:
            span = image.span
            if span.end > num_cached_tokens and span.digest not in chosen:
                node = self._choose(image, prefill, usable)
                chosen[span.digest] = node
                if node is not None:
                    self._note_work(node, image, epoch)
        engine_ids = tuple(
            node.engine_id if (node := chosen.get(image.span.digest)) is not None else ""
            for image in images
        )
        plan = EncodePlan(epoch, prefill.engine_id, engine_ids)
        firsts = {image.span.digest: image for image in reversed(images)}
        for node in usable:
            mine = (firsts[digest] for digest in chosen if chosen[digest] is node)
            # Commands list images in the order of the prompt
            own = tuple(sorted(mine, key=lambda image: image.span.first))
            if own:
                plan.by_node.append((node, own))
                # An encoding that the node keeps already may also wait in its queue
                plan.expected_s = max(plan.expected_s, self._open_s(node))
        return plan

    def _choose(self, image: PromptImage, prefill: Node, nodes: Iterable[Node]) -> Node | None:
        """Return the encode node that encodes an image at the lowest cost.

        Returns None if the prefill node has the encoding, or encodes at a lower cost.
        """
        digest, num_tokens = image.span.digest, image.span.num_tokens
        if self._has(prefill.engine_id, digest):
            return None
        costs = []
        for node in nodes:
            if num_tokens > _capacity(node):
                continue
            encode_s = encode_seconds(node.registration.encode_times, num_tokens)
            wait_s = self._open_s(node)
            there_s = 0.0 if self._has(node.engine_id, digest) else wait_s + encode_s
            # The prompt waits in the prefill node's queue in any case, so encoding delays it only
            # by the time beyond this wait.
            exposed_s = max(there_s - prefill.load.prefill_queue_s, 0.0)
            costs.append((exposed_s, wait_s, node.name, node, HOLD_FACTOR * encode_s))
        if not costs:
            return None
        exposed_s, _, _, node, here_s = min(costs, key=lambda one: one[:3])
        return node if exposed_s <= here_s else None

    def _open_s(self, node: Node) -> float:
        """Return the seconds that a node needs for all encoding work that is open there."""
        return sum(self._open.get(node.engine_id, {}).values())

    def _note_work(self, node: Node, image: PromptImage, epoch: int) -> None:
        kept = self._kept.setdefault(node.engine_id, _Kept(_capacity(node)))
        if image.span.digest in kept:
            kept.note(image)
            return
        kept.note(image)
        work = self._open.setdefault(node.engine_id, {})
        seconds = encode_seconds(node.registration.encode_times, image.span.num_tokens)
        work[epoch] = work.get(epoch, 0.0) + seconds

    def note_computed(
        self, plan: EncodePlan, images: Sequence[PromptImage], receipt: PrefillReceipt
    ) -> None:
        """Note that the prefill node has computed an attempt's prompt, and so has its encodings.

        An encode node whose encodings were lost gets no images for a while; the plan's other encode
        nodes still do.
        """
        kept = _Kept(DEFAULT_ENCODER_CACHE_TOKENS)
        kept = self._kept.setdefault(plan.prefill_engine_id, kept)
        for image in images:
            kept.note(image)
        lost = {plan.engine_ids[i] for i in receipt.lost_images if i < len(plan.engine_ids)}
        until = self._clock() + BARRED_S
        for node, _ in plan.by_node:
            if node.engine_id in lost:
                self._barred[node.engine_id] = until
                self._kept.pop(node.engine_id, None)
        self.close(plan)

    def close(self, plan: EncodePlan) -> None:
        """End the encoding work of an attempt; safe to repeat."""
        for node, _ in plan.by_node:
            self._open.get(node.engine_id, {}).pop(plan.epoch, None)

    def forget(self, engine_id: str) -> None:
        """Forget all about a node that left."""
        self._kept.pop(engine_id, None)
        self._open.pop(engine_id, None)
        self._barred.pop(engine_id, None)

    def _has(self, engine_id: str, digest: bytes) -> bool:
        kept = self._kept.get(engine_id)
        return kept is not None and digest in kept


class _Kept:
    """The images whose encodings a node probably keeps, limited by their total number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        # Number of tokens by digest, least recently used first
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def note(self, image: PromptImage) -> None:
        """Note that a node has an image's encoding, or will have it soon."""
        self._sizes[image.span.digest] = image.span.num_tokens
        self._sizes.move_to_end(image.span.digest)
        while sum(self._sizes.values()) > self._num_tokens:
            self._sizes.popitem(last=False)


def encode_seconds(times: Sequence[StepTime], num_tokens: int) -> float:
    """Estimate the seconds to encode an image.

    Args:
        times: the node's measured times, sorted by number of tokens.
        num_tokens: number of tokens that the image takes in the prompt.
    """
    if not times:
        return DEFAULT_S_PER_TOKEN * num_tokens
    if len(times) == 1:
        return times[0].seconds * num_tokens / times[0].num_tokens
    first, last = list(pairwise(times))[-1]
    slope = max(last.seconds - first.seconds, 0.0) / (last.num_tokens - first.num_tokens)
    return max(last.seconds + slope * (num_tokens - last.num_tokens), first.seconds)


def _capacity(node: Node) -> int:
    """Return how many image tokens the encodings kept by an encode node may have together."""
    assert node.registration.role is NodeRole.ENCODE
    return node.registration.num_blocks * node.registration.block_size
