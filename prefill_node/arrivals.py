"""Arrivals: encodings of images that encode nodes send to a prefill node.

    EXPECTED -> STARTED -> GRANTED -> received          read into the prompt, its units are free
        `----------`----------`-----> lost              this node encodes the image itself

A prompt waits until each of its expected encodings is received or lost. An encoding is lost when
its node refuses it, dies, is silent or takes too long, or when its bytes are wrong. Units of memory
that an encode node may still write go into quarantine. Refuses to know: pixels, steps, the router.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.kv.encodings import num_units, request_of, transfer_name
from baton.link.words import PrefillCommand
from baton.telemetry.ledger import BlockHolding, BlockOwner, Ledger, balance
from engine.core.images.prompt_images import ImagePixels, PromptImages
from engine.core.request import Request
from kvconnector.base import (
    HandoffRecord,
    KVReservation,
    TransferEvent,
    TransferEventKind,
    TransferKey,
)
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from node_runtime.encodings.units import Units
from node_runtime.quarantine import Quarantine

logger = logging.getLogger(__name__)

# Seconds for which to remember an ended transfer, and an event that came before its
# `PrefillCommand`.
MEMORY_S = 60.0
MAX_EARLY = 10_000  # limited, because a `PrefillCommand` may never come
# No further units are granted while prompts hold received encodings of this many bytes. Encodings
# that are on their way then may still arrive, which is one landing memory more.
MAX_RECEIVED_BYTES = 2**30
TICK_S = 0.1


class ReadsEncodings(Protocol):
    """The memory into which encode nodes write (`node_runtime/encodings/memory.py`)."""

    def read(self, units: Sequence[int], num_embeddings: int) -> ImagePixels | None:
        """Return a copy of an encoding; None: some of its values are NaN or infinite."""


class TakesEncodings(Protocol):
    """The part of an engine that continues a prompt once its encodings are received or lost."""

    def use_encodings(self, images: PromptImages) -> None:
        """Let a prompt go on with the encodings that it has; encode its other images here."""


@dataclass(slots=True)
class PromptWait:
    """The expected encodings of one prompt.

    Attributes:
        left: digests of the images whose encodings the prompt still waits for.
        lost: digests of the images whose encodings are lost.
        waited_s: seconds from the prompt's command until ``left`` was empty; 0 before.
    """

    request_id: str
    epoch: int
    images: PromptImages
    received_at: float
    expires_at: float
    left: set[bytes] = field(default_factory=set)
    lost: set[bytes] = field(default_factory=set)
    num_received: int = 0
    waited_s: float = 0.0

    @property
    def num_lost(self) -> int:
        """Return the number of different images whose encodings are lost."""
        return len(self.lost)

    @property
    def lost_images(self) -> tuple[int, ...]:
        """Return the indexes in the prompt of the images whose encodings are lost."""
        spans = enumerate(self.images.spans)
        return tuple(index for index, span in spans if span.digest in self.lost)


@dataclass(slots=True)
class _Arrival:
    """One encoding that an encode node sends, or is to send.

    Attributes:
        units: units that the encode node may write; empty before the grant.
    """

    prompt: PromptWait
    digest: bytes
    engine_id: str
    num_embeddings: int
    started: bool = False
    units: tuple[int, ...] = ()

    @property
    def state(self) -> str:
        """Return the name of the state, for operators."""
        if self.units:
            return "GRANTED"
        return "STARTED" if self.started else "EXPECTED"


@dataclass(frozen=True, slots=True)
class _Early:
    """An event of a transfer whose `PrefillCommand` has not come yet."""

    event: TransferEvent
    at: float

    def is_refusal(self, num_embeddings: int) -> bool:
        """Return whether no encoding with this many embeddings will come."""
        has_started = self.event.kind is TransferEventKind.STARTED
        return not has_started or self.event.num_tokens != num_embeddings


class Arrivals:
    """All encodings that one prefill node expects. Used on the node's thread.

    Args:
        engine: continues prompts whose encodings are received or lost.
        memory: the memory into which encode nodes write.
        units: which units of ``memory`` are free.
        receiver: sends grants to encode nodes.
        timeout_s: longest time that a prompt waits for encodings.
        clock: returns seconds, never going back.

    Attributes:
        quarantine: units that encode nodes may still write after a transfer's end.
        num_lost_total: number of encodings lost since the start.
    """

    def __init__(
        self,
        engine: TakesEncodings,
        memory: ReadsEncodings,
        units: Units,
        receiver: Receiver,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._memory, self._units = engine, memory, units
        self._receiver, self._timeout_s, self._clock = receiver, timeout_s, clock
        self.quarantine = Quarantine(units, receiver, clock)
        self.num_lost_total = 0
        self._connected: set[str] = set()  # engine ids of connected encode nodes
        # Prompts that wait for encodings, by request id and epoch.
        self._prompts: dict[tuple[str, int], PromptWait] = {}
        self._open: dict[TransferKey, _Arrival] = {}
        self._to_grant: deque[TransferKey] = deque()
        # Latest event of each transfer without a command so far, by transfer and engine id.
        self._early: dict[tuple[TransferKey, str], _Early] = {}
        self._ended: dict[TransferKey, float] = {}  # when each transfer ended, for a late `Start`
        self._received: weakref.WeakSet[ImagePixels] = weakref.WeakSet()  # those that prompts hold
        self._tick_at = 0.0

    # ------------------------------------------------------------------ prompts

    def expect(
        self, request: Request, command: PrefillCommand, received_at: float
    ) -> PromptWait | None:
        """Let a new request wait for encodings; return None if no encode node was asked for any.

        Call this before the engine gets the request.
        """
        images = request.images
        if images is None or not any(command.encode_engine_ids):
            return None
        now = self._clock()
        prompt = PromptWait(
            command.request_id, command.epoch, images, received_at, now + self._timeout_s
        )
        spans = zip(images.spans, images.places, command.encode_engine_ids, strict=False)
        for span, places, engine_id in spans:
            if engine_id and span.digest not in prompt.left | prompt.lost:
                arrival = _Arrival(prompt, span.digest, engine_id, len(places))
                self._expect_one(arrival)
        if prompt.left:
            images.awaits_encodings = True
            self._prompts[command.request_id, command.epoch] = prompt
        return prompt

    def _expect_one(self, arrival: _Arrival) -> None:
        prompt, engine_id = arrival.prompt, arrival.engine_id
        key = transfer_name(prompt.request_id, arrival.digest), prompt.epoch
        early = self._early.pop((key, engine_id), None)
        fits = num_units(arrival.num_embeddings) <= self._units.num_units
        is_refused = early is not None and early.is_refusal(arrival.num_embeddings)
        if engine_id not in self._connected or not fits or is_refused or key in self._ended:
            prompt.lost.add(arrival.digest)
            self.num_lost_total += 1
            self._ended[key] = self._clock()  # a `Start` of the encode node is answered by Cancel
            return
        prompt.left.add(arrival.digest)
        self._open[key] = arrival
        if early is not None:
            self._start(key, arrival)

    def cancel(self, request_id: str, epoch: int) -> None:
        """End the transfers for a request that has ended; do nothing if the request is unknown."""
        prompt = self._prompts.pop((request_id, epoch), None)
        if prompt is not None:
            for digest in sorted(prompt.left):
                self._end(*self._find(prompt, digest), quiet=False)

    # ------------------------------------------------------------------ encode nodes

    def add_peer(self, peer: PeerInfo) -> None:
        """Connect an encode node that joined the router, or joined it again."""
        self.quarantine.meet(peer)
        self._receiver.connect(peer)

    def lose_peer(self, engine_id: str) -> None:
        """Give up the encodings of an encode node that the router has lost.

        The encode node may be alive, so it stays connected until it sends `Quiet` or is known to be
        dead.
        """
        self._connected.discard(engine_id)
        self.quarantine.lose(engine_id)
        self._lose_all(engine_id, "its encode node is gone")

    def step(self) -> list[TransferEvent]:
        """Handle transfer events and deadlines, and grant units; return the events about peers."""
        of_peers = []
        for event in self._receiver.poll():
            match event.kind:
                case TransferEventKind.PEER_CONNECTED:
                    self._connected.add(event.engine_id)
                    of_peers.append(event)
                case TransferEventKind.PEER_FAILED:
                    self._connected.discard(event.engine_id)
                    self._lose_all(event.engine_id, "its encode node cannot be reached")
                    of_peers.append(event)
                case TransferEventKind.PEER_DRAINED:
                    self.quarantine.end_drained(event.engine_id)
                case _:
                    self._settle(event)
        self._tick()
        self._grant_waiting()
        self._receiver.expect(bool(self._open or self.quarantine))
        return of_peers

    def _settle(self, event: TransferEvent) -> None:
        key = (event.request_id, event.epoch)
        arrival = self._open.get(key)
        if arrival is None or arrival.engine_id != event.engine_id:
            self._settle_ended(key, event)
            return
        match event.kind:
            case TransferEventKind.STARTED if event.num_tokens != arrival.num_embeddings:
                arrival.started = True
                self._lose(key, arrival, f"it has {event.num_tokens} embeddings")
            case TransferEventKind.STARTED:
                self._start(key, arrival)
            case TransferEventKind.COMMITTED:
                self._receive(key, arrival, event.record)
            case TransferEventKind.FAILED:
                self._lose(key, arrival, event.reason or "it was cancelled", quiet=True)
            case _:  # watermarks are not needed
                pass

    def _settle_ended(self, key: TransferKey, event: TransferEvent) -> None:
        """Apply an event of a transfer that has ended here, or whose command has not come yet."""
        match event.kind:
            case TransferEventKind.COMMITTED | TransferEventKind.FAILED:
                self.quarantine.free(key, event.engine_id)
                self._remember_early(key, event)
            case TransferEventKind.STARTED if key in self._ended:
                self._receiver.cancel(*key, event.engine_id)
            case TransferEventKind.STARTED:
                self._remember_early(key, event)
            case _:
                pass

    def _remember_early(self, key: TransferKey, event: TransferEvent) -> None:
        """Keep an event for the command that it has overtaken; an ended transfer gets none."""
        self._early.pop((key, event.engine_id), None)  # the order is the order of time
        if key in self._ended:
            return
        self._early[key, event.engine_id] = _Early(event, self._clock())
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    # ------------------------------------------------------------------ one encoding

    def _start(self, key: TransferKey, arrival: _Arrival) -> None:
        """Queue an encoding for a grant, only once: its `Start` may come several times."""
        if not arrival.started:
            arrival.started = True
            self._to_grant.append(key)

    def _grant_waiting(self) -> None:
        """Grant units to encodings in the order of their `Start` messages, while there is memory.

        Prompts keep the encodings that they have received until they are computed. An encoding that
        gets no units in time is lost, and the prompt waits for the memory of pixel values instead.
        """
        while self._to_grant:
            place: int | None = 0
            if sum(one.num_bytes for one in self._received) >= MAX_RECEIVED_BYTES:
                place = self._place_of_oldest()
            if place is None:
                return
            key = self._to_grant[place]
            arrival = self._open.get(key)
            if arrival is not None:
                units = self._units.take(num_units(arrival.num_embeddings))
                if units is None:
                    return
                arrival.units = units
                self._receiver.grant(
                    KVReservation(
                        request_id=key[0],
                        epoch=key[1],
                        engine_id=arrival.engine_id,
                        block_ids=units,
                    )
                )
            del self._to_grant[place]

    def _place_of_oldest(self) -> int | None:
        """Return which encoding to grant although the memory is full; None: none.

        If prompts that still wait hold all received encodings, no memory becomes free until one of
        these prompts has all its encodings. The oldest prompt gets them.
        """
        held = sum(len(one.images.received) for one in self._prompts.values())
        if not self._prompts or len(self._received) > held:
            return None
        oldest = next(iter(self._prompts.values()))
        for place, key in enumerate(self._to_grant):
            arrival = self._open.get(key)
            if arrival is None or arrival.prompt is oldest:
                return place
        return None

    def _receive(self, key: TransferKey, arrival: _Arrival, record: HandoffRecord | None) -> None:
        """Read an encoding whose bytes have all arrived, and free its units."""
        prompt, wanted = arrival.prompt, (arrival.digest.hex(), arrival.num_embeddings)
        if record is None or not arrival.units or (record.image, record.num_tokens) != wanted:
            self._lose(key, arrival, "its record does not fit", quiet=True)
            return
        found = self._memory.read(arrival.units, arrival.num_embeddings)
        if found is None:
            self._lose(key, arrival, "it has NaN or infinite numbers", quiet=True)
            return
        self._end(key, arrival, quiet=True)
        prompt.images.received[arrival.digest] = found
        self._received.add(found)
        prompt.num_received += 1
        self._go_on(prompt, arrival.digest)

    def _lose(self, key: TransferKey, arrival: _Arrival, why: str, *, quiet: bool = False) -> None:
        """Give up waiting for an encoding: this node encodes the image."""
        logger.debug("an encoding of %s is lost: %s", arrival.engine_id, why)
        self._end(key, arrival, quiet=quiet)
        arrival.prompt.lost.add(arrival.digest)
        self.num_lost_total += 1
        self._go_on(arrival.prompt, arrival.digest)

    def _end(self, key: TransferKey, arrival: _Arrival, *, quiet: bool) -> None:
        """End a transfer; free its units, or quarantine units that may still be written.

        Args:
            quiet: whether the encode node certainly writes no more for this transfer.
        """
        del self._open[key]
        self._ended[key] = self._clock()
        units, arrival.units = arrival.units, ()
        if arrival.started and not quiet:
            if units:
                at = arrival.prompt.received_at
                self.quarantine.hold_blocks(key, arrival.engine_id, units, at)
            self._receiver.cancel(*key, arrival.engine_id)
        self._units.release(units)

    def _go_on(self, prompt: PromptWait, digest: bytes) -> None:
        """Note that an encoding is received or lost; after the last one, let the prompt go on."""
        prompt.left.discard(digest)
        if not prompt.left:
            prompt.waited_s = self._clock() - prompt.received_at
            del self._prompts[prompt.request_id, prompt.epoch]
            self._engine.use_encodings(prompt.images)

    def _lose_all(self, engine_id: str, why: str) -> None:
        """Give up waiting for all encodings of one encode node."""
        lost = [(key, one) for key, one in self._open.items() if one.engine_id == engine_id]
        for key, arrival in lost:
            self._lose(key, arrival, why)

    def _find(self, prompt: PromptWait, digest: bytes) -> tuple[TransferKey, _Arrival]:
        key = transfer_name(prompt.request_id, digest), prompt.epoch
        return key, self._open[key]

    def _tick(self) -> None:
        """Give up late encodings, run the quarantine's periodic work, and drop old entries."""
        now = self._clock()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        for prompt in list(self._prompts.values()):
            if now > prompt.expires_at:
                for digest in sorted(prompt.left):
                    self._lose(*self._find(prompt, digest), f"not here in {self._timeout_s:g} s")
        self.quarantine.tick()
        while self._ended and next(iter(self._ended.values())) < now - MEMORY_S:
            del self._ended[next(iter(self._ended))]
        while self._early and next(iter(self._early.values())).at < now - MEMORY_S:
            del self._early[next(iter(self._early))]

    # ------------------------------------------------------------------ what operators see

    @property
    def num_transfers(self) -> int:
        """Return the number of encodings that are expected, or whose units are in quarantine."""
        return len(self._open) + len(self.quarantine)

    @property
    def num_waiting(self) -> int:
        """Return the number of prompts that wait for encodings."""
        return len(self._prompts)

    def ledger(self) -> Ledger:
        """Return which units each transfer holds; for checks of invariants."""
        granted = [
            BlockHolding(
                owner=BlockOwner.GRANT,
                block_ids=arrival.units,
                request_id=arrival.prompt.request_id,
                epoch=key[1],
                state=arrival.state,
                peer=arrival.engine_id,
                age_s=self._clock() - arrival.prompt.received_at,
            )
            for key, arrival in self._open.items()
            if arrival.units
        ]
        quarantined = [
            dataclasses.replace(holding, request_id=request_of(holding.request_id))
            for holding in self.quarantine.ledger()
        ]
        return balance(
            [*granted, *quarantined],
            self._units.ref_counts(),
            num_blocks=self._units.num_units,
            num_free_blocks=self._units.num_free,
        )
