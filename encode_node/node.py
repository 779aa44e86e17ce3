"""EncodeNode: the encode loop: takes commands, encodes images, sends encodings.

    command -> decoded by a media process -> encoded -> kept by digest -> pushed to the prefill node
                  `---- another command with the image waits with it ----^

One thread calls `step`; commands come in, and reports go out, through queues. A prefill node that
does not get an encoding encodes the image itself, so no failure here becomes an error for a client.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.api.errors import BatonError, InvalidRequestError, TransferError
from baton.api.images import ImageSpan, PromptImage
from baton.kv.encodings import RECEIVER_ENDING, num_units, transfer_name
from baton.link.words import (
    AbortAll,
    CancelCommand,
    EncodeCommand,
    NodeBeat,
    NodeEvent,
    PeerReport,
    PeerUpdate,
    RequestView,
    RouterCommand,
)
from baton.telemetry.ledger import BlockHolding, BlockOwner, Ledger, balance
from encode_node.store import EncodingStore, KeptEncoding
from engine.core.images.prompt_images import ImagePixels, PromptImages
from kvconnector.base import (
    BlockPush,
    HandoffMetrics,
    HandoffRecord,
    TransferEvent,
    TransferEventKind,
    TransferKey,
    TransferOutcome,
)
from kvconnector.ends import Sender
from kvconnector.peer_info import PeerInfo

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.1


class MakesPixels(Protocol):
    """Decodes image files (`engine/images/pixel_maker.py`)."""

    def submit(self, images: PromptImages) -> None: ...

    def take_ready(self) -> list[tuple[PromptImages, BatonError | None]]: ...


@dataclass(slots=True, eq=False)
class _Job:
    """One image of one command in progress.

    Attributes:
        kept: the encoding that is being sent; None: it is not sent yet, or the job is refused.
    """

    command: EncodeCommand
    image: PromptImage
    received_at: float
    kept: KeptEncoding | None = None

    @property
    def key(self) -> TransferKey:
        """Return the name of the image's transfer."""
        return transfer_name(self.command.request_id, self.image.span.digest), self.command.epoch


@dataclass(slots=True)
class EncodeCounts:
    """Counts of an encode node's work since its start.

    Attributes:
        hits: number of images that needed no encoding, because an encoding was kept already.
        refused: number of images in commands that were not encoded.
        encoder_s: seconds spent in the encoder.
    """

    images_encoded: int = 0
    hits: int = 0
    refused: int = 0
    encoder_s: float = 0.0


@dataclass(slots=True)
class _Work:
    """An image to encode, and the jobs that wait for its encoding."""

    images: PromptImages
    jobs: list[_Job] = field(default_factory=list)


class EncodeNode:
    """Encodes images and sends the encodings to prefill nodes.

    Args:
        encode: returns an image's embeddings, ``[num_embeddings, width]``; raises ValueError if it
            cannot.
        store: keeps encodings in the memory from which they are sent.
        pixels: decodes image files.
        sender: sends encodings to prefill nodes.
        emit: takes events for the router; called on this node's thread.
        budget_tokens: maximum number of tokens of the images that one round encodes; one image may
            have more.
        clock: returns seconds, never going back.

    Attributes:
        counts: what the node has done since its start.
    """

    def __init__(
        self,
        encode: Callable[[ImagePixels], Any],
        store: EncodingStore,
        pixels: MakesPixels,
        sender: Sender,
        emit: Callable[[NodeEvent], None],
        budget_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = EncodeCounts()
        self._encode, self.store, self._pixels = encode, store, pixels
        self._sender, self._emit, self._clock = sender, emit, clock
        self._budget_tokens = budget_tokens
        self._commands: deque[tuple[float, RouterCommand | AbortAll]] = deque()
        # Open work by image digest, in order of arrival
        self._works: OrderedDict[bytes, _Work] = OrderedDict()
        self._decoded: deque[bytes] = deque()  # digests of decoded images to encode
        self._pushes: dict[TransferKey, _Job] = {}
        self._ended: dict[TransferOutcome, int] = dict.fromkeys(TransferOutcome, 0)
        self._expire_at = 0.0

    def submit(self, command: RouterCommand | AbortAll) -> None:
        """Queue a command for the next step; safe from any thread."""
        self._commands.append((self._clock(), command))

    def step(self) -> bool:
        """Run one round; return whether to run the next round at once."""
        while self._commands:
            self._handle_command(*self._commands.popleft())
        for images, error in self._pixels.take_ready():
            self._take_decoded(images, error)
        has_encoded = self._encode_some()
        events = self._sender.poll()
        for event in events:
            self._settle(event)
        self._expire()
        return bool(has_encoded or events or self._commands)

    # ------------------------------------------------------------------ commands

    def _handle_command(self, received_at: float, command: RouterCommand | AbortAll) -> None:
        match command:
            case EncodeCommand():
                for image in command.images:
                    self._start(_Job(command, image, received_at))
            case CancelCommand():
                self._cancel(lambda job: _is_of(job, command.request_id, command.epoch))
            case AbortAll():
                self._cancel(lambda job: command.concerns(job.command.request_id))
            case PeerUpdate(removed=True):
                self._sender.disconnect(command.engine_id + RECEIVER_ENDING)
            case PeerUpdate():
                self._meet(command)
            case _:
                logger.warning("this node does not handle %s", type(command).__name__)

    def _meet(self, update: PeerUpdate) -> None:
        try:
            name = update.engine_id + RECEIVER_ENDING
            self._sender.connect(PeerInfo.decode(update.peer_info, engine_id=name))
        except TransferError as error:
            self._emit(PeerReport(update.engine_id, False, problem=str(error)))

    def _start(self, job: _Job) -> None:
        """Send a kept encoding, wait with other jobs for the image, or have the image decoded."""
        digest, num_tokens = job.image.span.digest, job.image.span.num_tokens
        waiting = self._works[digest].jobs if digest in self._works else ()
        if job.key in self._pushes or any(one.key == job.key for one in waiting):
            return  # the command came twice
        kept = self.store.hold(digest)
        if kept is not None:
            self.counts.hits += 1
            self._push(job, kept)
            return
        if digest in self._works:
            self._works[digest].jobs.append(job)
            return
        try:
            if not self.store.may_fit(num_tokens):
                raise InvalidRequestError("image", f"has {num_tokens} tokens, too many to keep")
            images = _alone(job.image)
        except InvalidRequestError as error:
            self._refuse(job, error.problem)
            return
        images.add_user("encode")
        self._works[digest] = _Work(images, [job])
        self._pixels.submit(images)

    def _cancel(self, concerns: Callable[[_Job], bool]) -> None:
        """End all jobs for which ``concerns`` is True; do not tell prefill nodes, which know."""
        for digest, work in list(self._works.items()):
            work.jobs = [job for job in work.jobs if not concerns(job)]
            if not work.jobs:
                self._drop(digest)
        for key, job in list(self._pushes.items()):
            if concerns(job):
                self._sender.abort(*key, "")

    def _drop(self, digest: bytes) -> _Work:
        """Drop the work on an image, because its pixel values are no longer needed."""
        work = self._works.pop(digest)
        work.images.remove_user("encode")
        if digest in self._decoded:
            self._decoded.remove(digest)
        return work

    # ------------------------------------------------------------------ encoding

    def _take_decoded(self, images: PromptImages, error: BatonError | None) -> None:
        digest = images.spans[0].digest
        work = self._works.get(digest)
        if work is None or work.images is not images:  # its jobs were all cancelled
            return
        if error is None:
            self._decoded.append(digest)
        else:
            self._refuse_all(digest, str(error))

    def _encode_some(self) -> bool:
        """Encode decoded images, within the budget; return whether any was encoded."""
        num_tokens = 0
        while self._decoded and num_tokens < self._budget_tokens:
            digest = self._decoded[0]
            size = self._works[digest].images.spans[0].num_tokens
            if num_tokens and num_tokens + size > self._budget_tokens:
                break
            if not self.store.make_room(size):  # wait for transfers to end
                break
            self._encode_one(digest)
            num_tokens += size
        return num_tokens > 0

    def _encode_one(self, digest: bytes) -> None:
        images = self._works[digest].images
        assert images.pixels is not None
        began_at = self._clock()
        try:
            embeddings = self._encode(images.pixels[digest])
            if len(embeddings) > images.spans[0].num_tokens:
                raise ValueError("its encoding has more embeddings than the prompt has room for")
        except ValueError as error:
            self._refuse_all(digest, str(error))
            return
        finally:
            self.counts.encoder_s += self._clock() - began_at
        self.counts.images_encoded += 1
        self.store.add(digest, embeddings)
        for job in self._drop(digest).jobs:
            kept = self.store.hold(digest)
            assert kept is not None
            self._push(job, kept)

    # ------------------------------------------------------------------ sending

    def _push(self, job: _Job, kept: KeptEncoding) -> None:
        """Send an encoding; `_settle` releases its units once no write is in flight."""
        job.kept = kept
        self._pushes[job.key] = job
        name, epoch = job.key
        self._sender.start(
            name,
            epoch,
            job.command.prefill_engine_id + RECEIVER_ENDING,
            num_tokens=kept.num_embeddings,
            num_blocks=num_units(kept.num_embeddings),
        )
        self._sender.push(
            BlockPush(
                request_id=name,
                epoch=epoch,
                first_block=0,
                block_ids=kept.units,
                num_tokens=kept.num_embeddings,
                record=HandoffRecord(
                    num_tokens=kept.num_embeddings, token_id=0, image=kept.digest.hex()
                ),
            )
        )

    def _refuse_all(self, digest: bytes, why: str) -> None:
        for job in self._drop(digest).jobs:
            self._refuse(job, why)

    def _refuse(self, job: _Job, why: str) -> None:
        """Tell the prefill node that it must encode an image itself."""
        logger.debug("refused an image of %s: %s", job.command.request_id, why)
        self.counts.refused += 1
        self._pushes[job.key] = job
        name, epoch = job.key
        peer = job.command.prefill_engine_id + RECEIVER_ENDING
        self._sender.start(name, epoch, peer, num_tokens=0, num_blocks=0)
        self._sender.abort(name, epoch, why)

    def _settle(self, event: TransferEvent) -> None:
        match event.kind:
            case TransferEventKind.PEER_CONNECTED:
                engine_id, rate = _node_of(event.engine_id), event.bandwidth_bytes_per_s
                self._emit(PeerReport(engine_id, True, event.transport, "", rate))
            case TransferEventKind.PEER_FAILED:
                self._emit(PeerReport(_node_of(event.engine_id), False, problem=event.reason))
            case TransferEventKind.COMMITTED | TransferEventKind.FAILED:
                job = self._pushes.pop((event.request_id, event.epoch), None)
                if job is not None:
                    self._ended[event.outcome] += 1
                    if job.kept is not None:
                        self.store.release(job.kept)
            case _:
                pass

    def _expire(self) -> None:
        """End the jobs whose deadline has passed."""
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + EXPIRY_INTERVAL_S
        self._cancel(lambda job: now - job.received_at > job.command.timeout_s)

    # ------------------------------------------------------------------ what operators see

    def _waiting(self) -> Iterator[_Job]:
        for work in list(self._works.values()):
            yield from list(work.jobs)

    def beat(self) -> NodeBeat:
        """Return this node's load; safe from any thread."""
        works = list(self._works.values())
        return NodeBeat(
            num_waiting=sum(len(work.jobs) for work in works),
            num_free_blocks=self.store.units.num_free,
            num_transfers=len(self._pushes),
        )

    def requests(self) -> list[RequestView]:
        """Return all images that wait or are being sent; safe from any thread."""
        jobs = [(job, "WAITING") for job in self._waiting()]
        jobs += [(job, "PUSHING") for job in list(self._pushes.values())]
        now = self._clock()
        return [
            RequestView(
                request_id=job.command.request_id,
                status=state,
                transfer_state=state if job.kept else "",
                num_tokens=job.image.span.num_tokens,
                num_computed_tokens=job.kept.num_embeddings if job.kept else 0,
                num_blocks=len(job.kept.units) if job.kept else 0,
                age_s=now - job.received_at,
            )
            for job, state in jobs
        ]

    def ledger(self) -> Ledger:
        """Return which owners hold which units; call between steps, on this node's thread."""
        units, now = self.store.units, self._clock()
        kept = BlockHolding(owner=BlockOwner.CACHE, block_ids=tuple(self.store.kept_units()))
        pushed = [
            BlockHolding(
                owner=BlockOwner.PUSH,
                block_ids=job.kept.units,
                request_id=job.command.request_id,
                epoch=job.command.epoch,
                state="PUSHING",
                peer=job.command.prefill_engine_id,
                age_s=now - job.received_at,
            )
            for job in self._pushes.values()
            if job.kept is not None
        ]
        return balance(
            [one for one in (kept, *pushed) if one.block_ids],
            units.ref_counts(),
            num_blocks=units.num_units,
            num_free_blocks=units.num_free,
        )

    def handoff_metrics(self) -> HandoffMetrics:
        """Return counts of transfers; safe from any thread."""
        return HandoffMetrics(
            open={"PUSHING": len(self._pushes)},
            ended=dict(self._ended),
            num_quarantined_blocks=0,
        )

    def encode_counts(self) -> EncodeCounts:
        """Return a copy of `counts`; safe from any thread."""
        return dataclasses.replace(self.counts)


def _is_of(job: _Job, request_id: str, epoch: int) -> bool:
    return (job.command.request_id, job.command.epoch) == (request_id, epoch)


def _node_of(receiver: str) -> str:
    return receiver.removesuffix(RECEIVER_ENDING)


def _alone(image: PromptImage) -> PromptImages:
    """Make a prompt that has only this image; raises InvalidRequestError if the image is wrong."""
    num_tokens = image.span.num_tokens
    if not image.data:
        raise InvalidRequestError("image", "came without its file")
    span = ImageSpan(0, num_tokens, image.span.digest, image.span.grid)
    return PromptImages([PromptImage(span, image.data)], [0] * num_tokens, 0, num_tokens)
