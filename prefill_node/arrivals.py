"""Arrivals: encodings of images that encode nodes send to a prefill node.

    received          read into the prompt, its units are free
    lost              this node encodes the image itself

A prompt waits until each of its expected encodings is received or lost, also if the bytes are
wrong. `IncomingTransfers` has the states before. Refuses to know: pixels, steps, the router.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.api.errors import is_out_of_memory
from baton.kv.encodings import num_units, transfer_name
from baton.link.words import PrefillCommand
from baton.telemetry.ledger import Ledger, balance
from engine.core.images.prompt_images import ImagePixels, PromptImages
from engine.core.request import Request
from kvconnector.base import TransferEvent, TransferKey
from kvconnector.ends import Receiver
from node_runtime.encodings.units import Units
from node_runtime.incoming.transfers import IncomingTransfer, IncomingTransfers, TransferWords

logger = logging.getLogger(__name__)

WORDS = TransferWords(sender="encode node", granted="GRANTED")
# While prompts hold received encodings of this many bytes, no more units are granted. Encodings for
# which units were granted before still arrive; they need at most the size of the landing memory.
MAX_RECEIVED_BYTES = 2**30


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


@dataclass(slots=True, kw_only=True)
class _Arrival(IncomingTransfer):
    """One encoding that an encode node sends, or is to send; its blocks are units."""

    prompt: PromptWait
    digest: bytes
    num_embeddings: int


class Arrivals:
    """All encodings that one prefill node expects. Used on the node's thread.

    Args:
        engine: continues prompts whose encodings are received or lost.
        memory: the memory into which encode nodes write.
        units: which units of ``memory`` are free.
        receiver: sends grants to encode nodes.
        timeout_s: longest time that a prompt waits for encodings, beyond twice the time in which
            the router expects them.
        clock: returns seconds, never going back.

    Attributes:
        incoming: the transfers of the encodings.
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
        self._timeout_s, self._clock = timeout_s, clock
        self.incoming: IncomingTransfers[_Arrival] = IncomingTransfers(
            self, WORDS, units, receiver, clock
        )
        self.num_lost_total = 0
        # Prompts that wait for encodings, by request id and epoch.
        self._prompts: dict[tuple[str, int], PromptWait] = {}
        self._to_grant: deque[TransferKey] = deque()
        # Images whose encodings a prompt holds
        self._received: weakref.WeakSet[ImagePixels] = weakref.WeakSet()

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
        prompt = PromptWait(command.request_id, command.epoch, images, received_at)
        expected_s = min(2 * command.encode_wait_s, command.timeout_s)
        expires_at = self._clock() + expected_s + self._timeout_s
        spans = zip(images.spans, images.places, command.encode_engine_ids, strict=False)
        for span, places, engine_id in spans:
            if engine_id and span.digest not in prompt.left | prompt.lost:
                self._expect_one(
                    _Arrival(
                        engine_id=engine_id,
                        received_at=received_at,
                        expires_at=expires_at,
                        prompt=prompt,
                        digest=span.digest,
                        num_embeddings=len(places),
                    )
                )
        if prompt.left:
            images.awaits_encodings = True
            self._prompts[command.request_id, command.epoch] = prompt
        return prompt

    def _expect_one(self, arrival: _Arrival) -> None:
        prompt, engine_id = arrival.prompt, arrival.engine_id
        key = transfer_name(prompt.request_id, arrival.digest), prompt.epoch
        fits = num_units(arrival.num_embeddings) <= self._units.num_units
        early = self.incoming.early_tokens(key, engine_id)
        has_it = early in (None, arrival.num_embeddings)
        if fits and has_it and self.incoming.can_come(key, engine_id):
            prompt.left.add(arrival.digest)
            self.incoming.expect(key, arrival)
        else:
            prompt.lost.add(arrival.digest)
            self.num_lost_total += 1
            self.incoming.refuse(key, engine_id)

    def cancel(self, request_id: str, epoch: int) -> None:
        """End the transfers for a request that has ended; do nothing if the request is unknown."""
        prompt = self._prompts.pop((request_id, epoch), None)
        if prompt is not None:
            for digest in sorted(prompt.left):
                key = transfer_name(request_id, digest), epoch
                self.incoming.end(key, self.incoming.open[key], quiet=False)

    # ------------------------------------------------------------------ transfers

    def step(self) -> list[TransferEvent]:
        """Handle transfer events and deadlines, and grant units; return the events about peers."""
        of_peers = self.incoming.step()
        self._grant_waiting()
        return of_peers

    def start(self, key: TransferKey, arrival: _Arrival, num_tokens: int) -> None:
        """Queue an encoding for a grant."""
        if num_tokens == arrival.num_embeddings:
            self._to_grant.append(key)
        else:
            self.lose(key, arrival, f"it has {num_tokens} embeddings")

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
            arrival = self.incoming.open.get(key)
            if arrival is not None:
                units = self._units.take(num_units(arrival.num_embeddings))
                if units is None:
                    return
                self.incoming.grant(key, arrival, units)
            del self._to_grant[place]

    def _place_of_oldest(self) -> int | None:
        """Return the place in ``_to_grant`` of an encoding to grant although the memory is full.

        If prompts that still wait hold all received encodings, no memory becomes free until one of
        these prompts has all its encodings. So the oldest prompt's encodings are granted. Returns
        None if no encoding is to be granted.
        """
        held = sum(len(one.images.received) for one in self._prompts.values())
        if not self._prompts or len(self._received) > held:
            return None
        oldest = next(iter(self._prompts.values()))
        for place, key in enumerate(self._to_grant):
            arrival = self.incoming.open.get(key)
            if arrival is None or arrival.prompt is oldest:
                return place
        return None

    def receive(self, key: TransferKey, arrival: _Arrival, event: TransferEvent) -> None:
        """Read an encoding whose bytes have all arrived, and free its units."""
        prompt, wanted = arrival.prompt, (arrival.digest.hex(), arrival.num_embeddings)
        record, units = event.record, arrival.block_ids
        if record is None or not units or (record.image, record.num_tokens) != wanted:
            self.lose(key, arrival, "its commit record does not fit", quiet=True)
            return
        try:
            found = self._memory.read(units, arrival.num_embeddings)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.lose(key, arrival, "this node has too little memory for it", quiet=True)
            return
        if found is None:
            self.lose(key, arrival, "it has NaN or infinite numbers", quiet=True)
            return
        self.incoming.end(key, arrival, quiet=True)
        prompt.images.received[arrival.digest] = found
        self._received.add(found)
        prompt.num_received += 1
        self._go_on(prompt, arrival.digest)

    def lose(self, key: TransferKey, arrival: _Arrival, why: str, *, quiet: bool = False) -> None:
        """Give up waiting for an encoding: this node encodes the image."""
        logger.debug("an encoding of %s is lost: %s", arrival.engine_id, why)
        self.incoming.end(key, arrival, quiet=quiet)
        arrival.prompt.lost.add(arrival.digest)
        self.num_lost_total += 1
        self._go_on(arrival.prompt, arrival.digest)

    def _go_on(self, prompt: PromptWait, digest: bytes) -> None:
        """Note that an encoding is received or lost; after the last one, let the prompt go on."""
        prompt.left.discard(digest)
        if not prompt.left:
            prompt.waited_s = self._clock() - prompt.received_at
            del self._prompts[prompt.request_id, prompt.epoch]
            self._engine.use_encodings(prompt.images)

    # ------------------------------------------------------------------ what operators see

    @property
    def num_waiting(self) -> int:
        """Return the number of prompts that wait for encodings."""
        return len(self._prompts)

    def ledger(self) -> Ledger:
        """Return which units each transfer holds; for checks of invariants."""
        return balance(
            self.incoming.held(),
            self._units.ref_counts(),
            num_blocks=self._units.num_units,
            num_free_blocks=self._units.num_free,
        )
