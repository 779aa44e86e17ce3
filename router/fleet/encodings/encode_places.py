"""EncodePlaces: decides which node encodes each image of a prompt.

    kept on the prefill node     nobody encodes
    kept on an encode node       this node sends its encoding
    else                         the place with the lowest cost in seconds

The encoder and its cache on each node belong to the node; the router only remembers where images
were encoded lately. A wrong memory costs time: the prefill node encodes what is missing. Refuses to
know: links, attempts, why a prefill node was chosen.
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

# An encoding on a prefill node also delays the other prompts there, so it counts twice.
HOLD_FACTOR = 2.0
# Encode nodes whose encodings did not come get no images for this long.
BARRED_S = 5.0
# Time per image token of a node that has measured none.
DEFAULT_S_PER_TOKEN = 1e-3


@dataclass(slots=True)
class EncodePlan:
    """Where the images of one attempt are encoded.

    Attributes:
        epoch: number of the attempt.
        prefill_engine_id: the attempt's prefill node.
        engine_ids: per image the engine id of its encode node; empty: the prefill node.
        by_node: images of each encode node.
    """

    epoch: int
    prefill_engine_id: str
    engine_ids: tuple[str, ...]
    by_node: list[tuple[Node, tuple[PromptImage, ...]]] = field(default_factory=list)


class EncodePlaces:
    """Remembers images and open work by node. Belongs to one base model.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}  # by engine id
        self._open: dict[str, dict[int, float]] = {}  # by engine id: seconds of work, by epoch
        self._barred: dict[str, float] = {}  # by engine id: until when

    def plan(
        self,
        images: Sequence[PromptImage],
        prefill: Node,
        nodes: Sequence[Node],
        num_cached_tokens: int,
        epoch: int,
    ) -> EncodePlan | None:
        """Choose where an attempt's images are encoded; None: there is no encode node.

        Args:
            nodes: encode nodes that reach the prefill node.
            num_cached_tokens: leading prompt tokens that the prefill node does not compute.
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
            own = tuple(sorted(mine, key=lambda image: image.span.first))  # as commands need them
            if own:
                plan.by_node.append((node, own))
        return plan

    def _choose(self, image: PromptImage, prefill: Node, nodes: Iterable[Node]) -> Node | None:
        """Return the cheapest encode node of an image; None: the prefill node is cheaper."""
        digest, num_tokens = image.span.digest, image.span.num_tokens
        if self._has(prefill.engine_id, digest):
            return None
        costs = []
        for node in nodes:
            if num_tokens > _capacity(node):
                continue
            encode_s = encode_seconds(node.registration.encode_times, num_tokens)
            wait_s = sum(self._open.get(node.engine_id, {}).values())
            there_s = 0.0 if self._has(node.engine_id, digest) else wait_s + encode_s
            # The prompt waits for its turn on the prefill node in any case.
            exposed_s = max(there_s - prefill.load.prefill_queue_s, 0.0)
            costs.append((exposed_s, wait_s, node.name, node, HOLD_FACTOR * encode_s))
        if not costs:
            return None
        exposed_s, _, _, node, here_s = min(costs, key=lambda one: one[:3])
        return node if exposed_s <= here_s else None

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
        """Note that an attempt's prompt is computed, so that its prefill node keeps the images."""
        kept = _Kept(DEFAULT_ENCODER_CACHE_TOKENS)
        kept = self._kept.setdefault(plan.prefill_engine_id, kept)
        for image in images:
            kept.note(image)
        if receipt.num_encodings_lost:
            until = self._clock() + BARRED_S
            for node, _ in plan.by_node:
                self._barred[node.engine_id] = until
                self._kept.pop(node.engine_id, None)
        self.close(plan)

    def close(self, plan: EncodePlan) -> None:
        """Count an attempt's images as work no more; safe to repeat."""
        for node, _ in plan.by_node:
            self._open.get(node.engine_id, {}).pop(plan.epoch, None)

    def forget(self, engine_id: str) -> None:
        """Forget a node that left."""
        self._kept.pop(engine_id, None)
        self._open.pop(engine_id, None)
        self._barred.pop(engine_id, None)

    def _has(self, engine_id: str, digest: bytes) -> bool:
        kept = self._kept.get(engine_id)
        return kept is not None and digest in kept


class _Kept:
    """The images that a node probably keeps encodings of, at most of some tokens together."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def note(self, image: PromptImage) -> None:
        """Note that a node has, or soon has, an image's encoding."""
        self._sizes[image.span.digest] = image.span.num_tokens
        self._sizes.move_to_end(image.span.digest)
        while sum(self._sizes.values()) > self._num_tokens:
            self._sizes.popitem(last=False)


def encode_seconds(times: Sequence[StepTime], num_tokens: int) -> float:
    """Return the estimated time to encode an image, from times that rise with the tokens."""
    if not times:
        return DEFAULT_S_PER_TOKEN * num_tokens
    if len(times) == 1:
        return times[0].seconds * num_tokens / times[0].num_tokens
    first, last = list(pairwise(times))[-1]
    slope = max(last.seconds - first.seconds, 0.0) / (last.num_tokens - first.num_tokens)
    return max(last.seconds + slope * (num_tokens - last.num_tokens), first.seconds)


def _capacity(node: Node) -> int:
    """Return the most image tokens whose encodings an encode node keeps."""
    assert node.registration.role is NodeRole.ENCODE
    return node.registration.num_blocks * node.registration.block_size
