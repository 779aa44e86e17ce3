"""Messages between sender and receiver: short, typed, checked when decoded.

P -> D   Hello     are you there?                     D -> P   HelloAck  yes; try a write here
P -> D   SelfTest  written, at this speed             D -> P   SelfTestResult
P -> D   Start     I compute this prompt for you      D -> P   Grant     write it here
P -> D   Watermark tokens up to here are complete     D -> P   Cancel    write no more
P -> D   Commit    all is complete; token 1 is ...
P -> D   Quiet     I write no more; the reason
P -> D   Beat      I am alive                         D -> P   Beat      so am I, your beat arrived

With digests, D checks the content before a transfer ends:
P -> D   Digests   the blocks must have these     D -> P   Resend    these differ: write them again
                                                  D -> P   Verified  all blocks are right

Without repeats, the loss of a message would hold its request until the deadline. `Repeats` sends
some messages again until they are answered or no longer needed; these are idempotent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

from baton.api.errors import TransferError
from kvconnector.base import HandoffRecord, TransferKey

MAX_TEXT_CHARS = 4096
REPEAT_S = 1.0

# Limits of the fields' values, as peers are not trusted.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ByteCount = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
BlockIds = Annotated[list[int], msgspec.Meta(max_length=2**20)]
Places = Annotated[list[Count], msgspec.Meta(max_length=4096)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; ``engine_id`` identifies the sending process."""

    engine_id: Name


class _RequestMessage(_Message, frozen=True, kw_only=True):
    request_id: Name
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Hello(_Message, frozen=True, kw_only=True):
    """P asks whether D knows it and is awake.

    Attributes:
        sent_at_s: time on P's clock, which D sends back unchanged.
        test: number of the self-test that P wants; it grows with each test.
    """

    sent_at_s: float = 0.0
    test: Count = 0


class HelloAck(_Message, frozen=True, kw_only=True):
    """D knows P, which may write self-test ``test`` to ``slot``; None: no slot is free now."""

    sent_at_s: float = 0.0
    test: Count = 0
    slot: Count | None = None


class SelfTest(_Message, frozen=True, kw_only=True):
    """P's test writes are complete; D's slot must contain bytes with this ``digest``."""

    test: Count
    digest: Digest
    transport: Text
    bandwidth_bytes_per_s: float
    duration_s: float
    sent_at_s: float = 0.0


class SelfTestResult(_Message, frozen=True, kw_only=True):
    """D has checked its slot; ``problem`` is empty if the bytes are right."""

    test: Count
    problem: Text = ""
    sent_at_s: float = 0.0


class Start(_RequestMessage, frozen=True, kw_only=True):
    """P began to compute a prompt of ``num_tokens`` tokens."""

    num_tokens: Count


class Grant(_RequestMessage, frozen=True, kw_only=True):
    """P may write the prompt's blocks from ``first_block`` on to D's ``block_ids``, in order.

    ``first_block`` is an index of travelling blocks (`BlockPush.first_block`); D has the rest.
    """

    block_ids: BlockIds  # checked against the peer's blocks before use
    first_block: Count = 0


class Watermark(_RequestMessage, frozen=True, kw_only=True):
    """``num_tokens`` tokens are complete in D, in the first ``num_blocks`` granted blocks."""

    num_tokens: Count
    num_blocks: Count = 0


class Commit(_RequestMessage, frozen=True, kw_only=True):
    """All blocks are complete in D's memory; D continues from ``record``.

    The other fields are the transfer's cost, for the receipt.
    """

    record: HandoffRecord
    num_bytes: ByteCount
    num_blocks: Count
    transport: Text
    exposed_transfer_s: Seconds
    num_descriptors: Count = 0
    posting_s: Seconds = 0.0


class Cancel(_RequestMessage, frozen=True, kw_only=True):
    """D no longer wants this request's KV; P answers Quiet."""


class Quiet(_RequestMessage, frozen=True, kw_only=True):
    """P has nothing posted for this request, and will post nothing more."""

    reason: Text


class Beat(_Message, frozen=True, kw_only=True):
    """P is alive; D's answer, also a Beat, renews P's lease to write to D's memory.

    ``sent_at_s``: time on P's clock, as in `Hello`. The lease runs from this time, not from the
    answer's arrival, as the answer may have waited in a queue.
    """

    sent_at_s: float = 0.0


class Digests(_RequestMessage, frozen=True, kw_only=True):
    """Keyed digests of granted blocks whose writes are complete.

    Attributes:
        indices: places of the blocks among the request's travelling blocks.
        layers: the written layers; None: all.
        attempt: how often D has asked for these blocks again.
        first_number: number of the first digest, from which the others count. Numbers are never
            reused.
    """

    indices: Places
    digests: Annotated[bytes, msgspec.Meta(max_length=2**16)]
    layers: tuple[Count, Count] | None = None
    attempt: Count = 0
    first_number: ByteCount = 0


class Resend(_RequestMessage, frozen=True, kw_only=True):
    """D asks P to write blocks again, as their content differs from P's digests."""

    indices: Places
    layers: tuple[Count, Count]
    attempt: Count


class Verified(_RequestMessage, frozen=True, kw_only=True):
    """D has compared all blocks, and they are right: P may release its own."""


Message = (
    Hello
    | HelloAck
    | SelfTest
    | SelfTestResult
    | Start
    | Grant
    | Watermark
    | Commit
    | Cancel
    | Quiet
    | Beat
    | Digests
    | Resend
    | Verified
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Decode a message; raise TransferError if the bytes are no message of ours."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(f"not a message of this protocol: {error}") from error


@dataclass(slots=True)
class Repeat:
    """A message that is sent again until it is answered."""

    engine_id: str
    message: Message
    next_at: float


class Repeats:
    """All repeated messages of one end, at most one per transfer."""

    def __init__(self) -> None:
        self._repeats: dict[TransferKey, Repeat] = {}
        self._next_at = math.inf  # no message is due earlier

    def __len__(self) -> int:
        return len(self._repeats)

    def add_message(self, key: TransferKey, engine_id: str, message: Message, now: float) -> None:
        """Send ``message`` again every ``REPEAT_S``."""
        self._repeats[key] = Repeat(engine_id, message, now + REPEAT_S)
        self._next_at = min(self._next_at, now + REPEAT_S)

    def put_off(self, key: TransferKey, engine_id: str, now: float) -> None:
        """Postpone a repeat, as the peer has just sent a message about the transfer."""
        repeat = self._repeats.get(key)
        if repeat is not None and repeat.engine_id == engine_id:
            repeat.next_at = now + REPEAT_S

    def remove(self, key: TransferKey, engine_id: str) -> None:
        """Stop repeating a message; do nothing if none is repeated to this peer."""
        repeat = self._repeats.get(key)
        if repeat is not None and repeat.engine_id == engine_id:
            del self._repeats[key]

    def remove_peer(self, engine_id: str) -> None:
        """Forget all messages to a lost peer."""
        for key in [k for k, repeat in self._repeats.items() if repeat.engine_id == engine_id]:
            del self._repeats[key]

    def take_due(self, now: float) -> list[tuple[TransferKey, Repeat]]:
        """Return the messages that are due now; O(1) while none is due."""
        if now < self._next_at:
            return []
        due = [(key, repeat) for key, repeat in self._repeats.items() if now >= repeat.next_at]
        for _, repeat in due:
            repeat.next_at = now + REPEAT_S
        self._next_at = min((r.next_at for r in self._repeats.values()), default=math.inf)
        return due
