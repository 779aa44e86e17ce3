"""Digests of blocks: a decode node (D) checks that it has the bytes that a prefill node (P) sent.

    P  digests its memory when it posts a piece   -> sends Digests once the piece is complete
    D  digests its own memory                     -> equal: verified; different: sends Resend with
                                                     the number of the attempt

Digests are keyed (`pair_keys.py`), so bytes that another process wrote, or bytes of another block,
do not match. Each end has a filter around its state machine, which does not know the filter. The
sender's filter sends digests. The receiver's filter holds back watermarks and commits until the
blocks that they report are verified.

Refuses to know: tokens, what happens to a request whose blocks stay wrong.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.api.errors import TransferError
from baton.kv.block_key import DIGEST_BYTES, BlockKey
from baton.kv.manifest import KVManifest
from baton.limits import NUM_LAYER_GROUPS
from kvconnector.base import NO_TRANSFER, KVReservation, TransferKey
from kvconnector.blocks import LayerRange, Slices
from kvconnector.protocol.actions import (
    Action,
    Drop,
    Input,
    Leave,
    Meet,
    Posted,
    Send,
    StateMachine,
    Write,
    WriteEnded,
)
from kvconnector.protocol.messages import (
    Commit,
    Digests,
    Quiet,
    Resend,
    Verified,
    Watermark,
)
from kvconnector.protocol.repeats import REPEAT_S
from kvconnector.protocol.seals import Channels
from kvconnector.protocol.transfer import MAX_ATTEMPTS

logger = logging.getLogger(__name__)

# A message with 8-byte indices then stays below 8 KiB, one fragment of the transport
MAX_DIGESTS_PER_MESSAGE = 320
# Maximum number of ranges of layers per block that a decode node keeps as wrong or missing. A
# correct sender writes a block in at most NUM_LAYER_GROUPS ranges, and the decode node may also
# request joined ranges.
MAX_RANGES_PER_BLOCK = 2 * NUM_LAYER_GROUPS


@dataclass(frozen=True, slots=True)
class Written:
    """The identity of the blocks of one write; their digests cover this identity, too.

    Attributes:
        places: indexes of the blocks among the request's transferred blocks.
        layers: the written layers of each block.
        attempt: how often the decode node has requested these blocks again; 0: the first write.
        numbers: for each block, the number of its digest, never used before with the same key.
        peer: engine id of the other node.
        groups: KV group of each block; empty: there is only one group.
    """

    request_id: str
    epoch: int
    places: Sequence[int]
    layers: LayerRange
    attempt: int
    numbers: Sequence[int]
    peer: str = ""
    groups: Sequence[int] = ()

    def contexts(self) -> Iterator[bytes]:
        """Yield the identity of each block as bytes: request, epoch, place, layers and attempt."""
        before = self.epoch.to_bytes(8, "big")
        after = b"".join(number.to_bytes(8, "big") for number in (*self.layers, self.attempt))
        after += self.request_id.encode()
        return (before + place.to_bytes(8, "big") + after for place in self.places)


class BlockReader(Protocol):
    """Computes the digests of blocks in this node's memory; `BlockDigests` implements it."""

    num_layers: int

    def of(
        self,
        block_ids: Sequence[int],
        written: Written,
        key: BlockKey,
        slices: Slices | None = None,
        *,
        writes: bool = True,
    ) -> bytes:
        """Return the digests of all blocks, joined; see `BlockDigests.of`."""


class SentDigests:
    """Computes the digests of a sender's writes; each digest has a number that is used only once.

    Args:
        digests: computes digests of blocks in the sender's memory.
        own_engine_id: the sender's engine id.
    """

    def __init__(self, digests: BlockReader, own_engine_id: str) -> None:
        self._digests = digests
        self._own_engine_id = own_engine_id
        self._num_digests = 0

    def of(self, write: Write, key: BlockKey, slices: Slices | None = None) -> Digests:
        """Return the message with the digests that the decode node must find after this write.

        Args:
            key: the key for digests of blocks that this node sends to the decode node.
            slices: how the ranks of both nodes divide a block; None: each block is one slice.
        """
        piece, (request_id, epoch) = write.piece, write.key
        first = self._num_digests
        self._num_digests += len(piece.block_ids)
        numbers = range(first, self._num_digests)
        layers = piece.layers or (0, self._digests.num_layers)
        written = Written(
            *(request_id, epoch, piece.indices, layers, piece.attempt, numbers),
            write.engine_id,
            write.groups,
        )
        return Digests(
            engine_id=self._own_engine_id,
            request_id=request_id,
            epoch=epoch,
            indices=list(piece.indices),
            digests=self._digests.of(piece.block_ids, written, key, slices),
            layers=piece.layers,
            attempt=piece.attempt,
            first_number=first,
        )


class DigestTeller:
    """A filter around the sender's state machine: sends the digests of each completed write.

    Args:
        machine: the sender's state machine.
        digests: computes the digests of each write.
        channels: hold, for each peer, the key for digests of blocks to the peer.
        manifest: layout of the sender's memory; None: all nodes have one rank.
    """

    def __init__(
        self,
        machine: StateMachine,
        digests: SentDigests,
        channels: Channels,
        manifest: KVManifest | None = None,
    ) -> None:
        self._machine = machine
        self._digests = digests
        self._channels = channels
        self._manifest = manifest
        self._slices: dict[str, Slices] = {}
        self._posted: defaultdict[tuple[str, TransferKey], deque[Digests]] = defaultdict(deque)

    def handle_input(self, item: Input, now: float) -> list[Action]:
        sends: list[Action] = []
        match item:
            case Posted(action=Write(engine_id, key), is_done=is_done, problem=problem):
                if problem:  # this is the newest write; earlier writes may be in flight
                    self._pop_digests(engine_id, key, -1)
                elif is_done:
                    sends = self._send_digests(engine_id, key)
            case WriteEnded(engine_id, key, problem) if key != NO_TRANSFER:
                sends = self._send_digests(engine_id, key, problem)
            case Meet(peer=peer) if self._manifest is not None:
                self._slices.setdefault(peer.engine_id, Slices(self._manifest, peer.manifest))
            case Leave(engine_id=engine_id):
                self._slices.pop(engine_id, None)
            case _:
                pass
        actions = self._machine.handle_input(item, now)
        for action in actions:
            if isinstance(action, Write):  # digest the blocks before they are written
                self._add_digests(action)
        return sends + actions

    def tick(self, now: float) -> list[Action]:
        return self._machine.tick(now)

    def _add_digests(self, write: Write) -> None:
        key = self._channels[write.engine_id].keys.send_blocks
        digests = self._digests.of(write, key, self._slices.get(write.engine_id))
        self._posted[write.engine_id, write.key].append(digests)

    def _send_digests(self, engine_id: str, key: TransferKey, problem: str = "") -> list[Action]:
        """Return actions that send the digests of a transfer's oldest write; none if it failed."""
        digests = self._pop_digests(engine_id, key, 0)
        return [] if problem else [Send(engine_id, part) for part in cut_digests(digests)]

    def _pop_digests(self, engine_id: str, key: TransferKey, place: int) -> Digests:
        """Remove and return the digests of a transfer's oldest (0) or newest (-1) write."""
        posted = self._posted[engine_id, key]
        digests = posted[place]
        del posted[place]
        if not posted:
            del self._posted[engine_id, key]
        return digests


def cut_digests(whole: Digests) -> Iterator[Digests]:
    """Yield a message in parts of at most ``MAX_DIGESTS_PER_MESSAGE`` digests."""
    for start in range(0, len(whole.indices), MAX_DIGESTS_PER_MESSAGE):
        end = start + MAX_DIGESTS_PER_MESSAGE
        yield msgspec.structs.replace(
            whole,
            indices=whole.indices[start:end],
            digests=whole.digests[start * DIGEST_BYTES : end * DIGEST_BYTES],
            first_number=whole.first_number + start,
        )


@dataclass(slots=True)
class Arrival:
    """The blocks that were granted for one request, and which of them are verified.

    Attributes:
        layers: for each block, a bit mask of its verified layers.
        attempts: how often layers of a block were requested again, by the block's index and layers.
        missing: index and layers of the blocks that were requested again and have not arrived.
        watermark: the watermark that is held back, because its blocks are not all verified.
        commit: the commit that is held back, because not all blocks are verified.
        asked_at: when the commit arrived, or when missing blocks were last requested again.
        groups: KV group of each block; empty: there is only one group.
        has_warned: whether a warning was logged because the sender exceeded `max_ranges`.
    """

    engine_id: str
    block_ids: Sequence[int]
    layers: list[int]
    attempts: dict[tuple[int, LayerRange], int] = field(default_factory=dict)
    missing: set[tuple[int, LayerRange]] = field(default_factory=set)
    watermark: Watermark | None = None
    commit: Commit | None = None
    asked_at: float = -math.inf
    groups: Sequence[int] = ()
    has_warned: bool = False

    @property
    def max_ranges(self) -> int:
        """Return the maximum size of ``attempts``, which bounds ``missing``, too."""
        return MAX_RANGES_PER_BLOCK * len(self.block_ids)

    def open_places(self, message: Digests, layers: LayerRange) -> list[int]:
        """Return the places in ``message`` of digests that this node still needs to compare."""
        bits = _bits(layers)
        return [
            place
            for place, index in enumerate(message.indices)
            if index < len(self.block_ids)
            and (self.layers[index] & bits != bits or (index, layers) in self.missing)
            and self.attempts.get((index, layers), 0) == message.attempt
        ]

    def leave_out_new_ranges(self, places: list[int], message: Digests, layers: LayerRange) -> None:
        """Remove the places from ``places`` for whose blocks ``attempts`` has no room.

        Logs one warning per transfer.

        Args:
            places: places in ``message`` of the digests to compare; changed by this call.
            layers: the range of layers of all these digests.
        """
        num_left = self.max_ranges - len(self.attempts)
        if num_left >= len(places):
            return
        kept = []
        for place in places:
            is_new = (message.indices[place], layers) not in self.attempts
            if not is_new or num_left > 0:
                kept.append(place)
                num_left -= is_new
        if len(kept) < len(places) and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "request %s: prefill node %s sent digests of more than %d wrong ranges of layers "
                "per block; dropped the others",
                *(message.request_id, self.engine_id, MAX_RANGES_PER_BLOCK),
            )
        places[:] = kept


class DigestVerifier:
    """A filter around the receiver's state machine: holds messages back until blocks are verified.

    Args:
        machine: the receiver's state machine.
        digests: computes digests of blocks in the receiver's memory.
        own_engine_id: the receiver's engine id.
        channels: hold, for each peer, the key for digests of blocks from the peer.
        manifest: layout of the receiver's memory; None: all nodes have one rank.

    Attributes:
        num_wrong_blocks: number of arrived blocks whose digest differed from the sender's digest.
    """

    def __init__(
        self,
        machine: StateMachine,
        digests: BlockReader,
        own_engine_id: str,
        channels: Channels,
        manifest: KVManifest | None = None,
    ) -> None:
        self._manifest = manifest
        self._slices: dict[str, Slices] = {}
        self._machine = machine
        self._digests = digests
        self._all_layers = (1 << digests.num_layers) - 1
        self._arrivals: dict[TransferKey, Arrival] = {}
        self._own_engine_id = own_engine_id
        self._channels = channels
        self.num_wrong_blocks = 0
        # Results of the present input: messages to peers, and inputs for ``machine``
        self._said: list[Action] = []
        self._passed: list[Input] = []

    def handle_input(self, item: Input, now: float) -> list[Action]:
        self._said, self._passed = [], []
        self._filter(item, now)
        actions = self._said
        for passed in self._passed:
            actions += self._machine.handle_input(passed, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        return self._machine.tick(now)

    def __len__(self) -> int:
        """Return the number of granted transfers whose blocks are not all verified."""
        return len(self._arrivals)

    def _filter(self, item: Input, now: float) -> None:
        """Note an input's facts about blocks; pass the input on, or hold it back."""
        match item:
            case Watermark() | Commit():
                self._hold_back(item, now)
                return
            case Digests():
                self._check(item)
            case KVReservation():
                key = (item.request_id, item.epoch)
                self._expect(key, item.engine_id, item.block_ids, item.first_block)
                self._arrivals[key].groups = item.groups
            case Meet(peer=peer) if self._manifest is not None:
                self._slices.setdefault(peer.engine_id, Slices(peer.manifest, self._manifest))
            case Quiet():
                key = (item.request_id, item.epoch)
                if self._find(key, item.engine_id) is not None:
                    self._forget(key)
            case Drop():
                self._forget(item.key)
            case Leave():
                self._forget_peer(item.engine_id)
            case _:
                pass
        self._passed.append(item)

    def _say(self, engine_id: str, message: Resend | Verified) -> None:
        self._said.append(Send(engine_id, message))

    def _hold_back(self, message: Watermark | Commit, now: float) -> None:
        """Hold a message back until its blocks are verified.

        If the sender repeats a held Commit, request the unverified blocks again.
        """
        arrival = self._find((message.request_id, message.epoch), message.engine_id)
        if isinstance(message, Watermark):
            if arrival is not None:
                arrival.watermark = message
                self._pass_verified(arrival)
        elif arrival is None:  # all is verified: this node's Verified message was lost
            self._say_verified(message)
        elif arrival.commit is None:
            arrival.commit, arrival.asked_at = message, now
            self._pass_verified(arrival)
        # If the same Commit arrives again after this time, the sender has repeated it. An earlier
        # copy may be a duplicate that the network made.
        elif now - arrival.asked_at >= REPEAT_S / 2:
            arrival.asked_at = now
            for resend in self._ask_again(arrival, message):
                self._say(message.engine_id, resend)

    def _check(self, message: Digests) -> None:
        arrival = self._find((message.request_id, message.epoch), message.engine_id)
        if arrival is None:
            return
        key = self._channels[message.engine_id].keys.receive_blocks
        try:
            resend = self._compare(message, key)
        # Another rank failed: the blocks stay unverified, and are requested again later
        except TransferError as error:
            logger.warning("request %s: cannot verify blocks: %s", message.request_id, error)
            return
        if resend is not None:
            self.num_wrong_blocks += len(resend.indices)
            logger.warning(
                "%d blocks of request %s arrived wrong, attempt %d",
                len(resend.indices),
                message.request_id,
                resend.attempt,
            )
            self._say(message.engine_id, resend)
        self._pass_verified(arrival)

    def _pass_verified(self, arrival: Arrival) -> None:
        """Pass held messages whose blocks are all verified now to the state machine."""
        watermark, commit = arrival.watermark, arrival.commit
        if commit is not None and self._is_verified(arrival, len(arrival.block_ids)):
            self._forget((commit.request_id, commit.epoch))
            self._say_verified(commit)
            self._passed.append(commit)
        elif watermark is not None and self._is_verified(arrival, watermark.num_blocks):
            arrival.watermark = None
            self._passed.append(watermark)

    def _say_verified(self, commit: Commit) -> None:
        verified = Verified(
            engine_id=self._own_engine_id, request_id=commit.request_id, epoch=commit.epoch
        )
        self._say(commit.engine_id, verified)

    # ------------------------------------------------------------------ what has arrived

    def _expect(
        self, key: TransferKey, engine_id: str, block_ids: Sequence[int], first_block: int = 0
    ) -> None:
        """Record the blocks that were granted to a peer, as blocks to verify.

        Args:
            first_block: index of the first granted block; this node already has the earlier blocks.
        """
        here = [self._all_layers] * first_block
        self._arrivals[key] = Arrival(
            engine_id, [*[0] * first_block, *block_ids], here + [0] * len(block_ids)
        )

    def _find(self, key: TransferKey, engine_id: str) -> Arrival | None:
        """Return the record of an open transfer from this peer, or None."""
        arrival = self._arrivals.get(key)
        return arrival if arrival is not None and arrival.engine_id == engine_id else None

    def _forget(self, key: TransferKey) -> None:
        self._arrivals.pop(key, None)

    def _forget_peer(self, engine_id: str) -> None:
        self._slices.pop(engine_id, None)
        for key in [k for k, arrival in self._arrivals.items() if arrival.engine_id == engine_id]:
            del self._arrivals[key]

    def _compare(self, message: Digests, key: BlockKey) -> Resend | None:
        """Compare digests with this node's memory; return a request to resend blocks, or None.

        A late, duplicate or inconsistent message changes nothing.

        Args:
            key: the key for digests of blocks from the sender.
        """
        arrival = self._find((message.request_id, message.epoch), message.engine_id)
        layers = message.layers or (0, self._digests.num_layers)
        fits = 0 <= layers[0] < layers[1] <= self._digests.num_layers
        if (
            arrival is None
            or not fits
            or message.attempt > MAX_ATTEMPTS  # a correct sender has failed the transfer before
            or len(message.digests) != DIGEST_BYTES * len(message.indices)
            or len(set(message.indices)) != len(message.indices)
        ):
            return None
        bits = _bits(layers)
        open_places = arrival.open_places(message, layers)
        arrival.leave_out_new_ranges(open_places, message, layers)
        indices = [message.indices[place] for place in open_places]
        written = Written(
            message.request_id,
            message.epoch,
            indices,
            layers,
            message.attempt,
            [message.first_number + place for place in open_places],
            message.engine_id,
            [arrival.groups[index] for index in indices] if arrival.groups else (),
        )
        found = self._digests.of(
            [arrival.block_ids[index] for index in indices],
            written,
            key,
            self._slices.get(message.engine_id),
            writes=False,
        )
        wrong = []
        for number, (place, index) in enumerate(zip(open_places, indices, strict=True)):
            if hmac.compare_digest(_digest(found, number), _digest(message.digests, place)):
                arrival.layers[index] |= bits
                arrival.missing.discard((index, layers))
            else:
                arrival.layers[index] &= ~bits
                arrival.attempts[index, layers] = message.attempt + 1
                arrival.missing.add((index, layers))
                wrong.append(index)
        if not wrong:
            return None
        return Resend(
            engine_id=self._own_engine_id,
            request_id=message.request_id,
            epoch=message.epoch,
            indices=wrong,
            layers=layers,
            attempt=message.attempt + 1,
        )

    def _ask_again(self, arrival: Arrival, commit: Commit) -> Iterator[Resend]:
        """Yield requests to resend unverified blocks; call only if no write is in flight.

        Blocks are still unverified after the commit if messages (Digests or Resend) were lost.
        Blocks that were requested before are requested with the same layers and the next attempt
        number.
        """
        known = list(arrival.layers)  # verified layers, and layers that were requested before
        for index, layer_range in arrival.missing:
            known[index] |= _bits(layer_range)
        num_left = arrival.max_ranges - len(arrival.attempts)
        for index, layers in enumerate(known):
            if layers != self._all_layers and num_left > 0:
                runs = _zero_runs(layers, self._digests.num_layers)[:num_left]
                arrival.missing.update((index, run) for run in runs)
                num_left -= len(runs)
        wanted: defaultdict[tuple[LayerRange, int], list[int]] = defaultdict(list)
        for index, layer_range in sorted(arrival.missing):
            attempt = arrival.attempts.get((index, layer_range), 0) + 1
            arrival.attempts[index, layer_range] = attempt
            wanted[layer_range, attempt].append(index)
        for (layer_range, attempt), indices in wanted.items():
            for start in range(0, len(indices), MAX_DIGESTS_PER_MESSAGE):
                yield Resend(
                    engine_id=self._own_engine_id,
                    request_id=commit.request_id,
                    epoch=commit.epoch,
                    indices=indices[start : start + MAX_DIGESTS_PER_MESSAGE],
                    layers=layer_range,
                    attempt=attempt,
                )

    def _is_verified(self, arrival: Arrival, num_blocks: int) -> bool:
        """Return whether the first ``num_blocks`` blocks are verified, and none must be resent."""
        if any(index < num_blocks for index, _ in arrival.missing):
            return False
        return all(layers == self._all_layers for layers in arrival.layers[:num_blocks])


def _digest(digests: bytes, place: int) -> bytes:
    return digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]


def _bits(layers: LayerRange) -> int:
    """Return a bit mask of the layers of a range."""
    return (1 << layers[1]) - (1 << layers[0])


def _zero_runs(bits: int, num_bits: int) -> list[LayerRange]:
    """Return the ranges of consecutive 0 bits among the lowest ``num_bits`` bits."""
    runs = []
    zeros = ~bits & ((1 << num_bits) - 1)
    while zeros:
        first = (zeros & -zeros).bit_length() - 1
        after = (zeros >> first) + 1  # its lowest 1 bit follows the run
        end = first + (after & -after).bit_length() - 1
        runs.append((first, end))
        zeros &= -1 << end
    return runs
