"""What sender and receiver say to each other. Short, typed, checked when decoded.

P -> D   Hello     are you there?                     D -> P   HelloAck  yes; try a write here
P -> D   SelfTest  it is written, and so fast         D -> P   SelfTestResult
P -> D   Start     I compute this prompt for you      D -> P   Grant     write it here
P -> D   Watermark tokens up to here are complete     D -> P   Cancel    write no more
P -> D   Commit    all is complete; token 1 is ...
P -> D   Quiet     I write no more, for this reason
P -> D   Beat      I live                             D -> P   Beat      so do I: your beat came

With digests, a Commit is not the end:
P -> D   Digests   what arrived must be this      D -> P   Resend    it is not: write it again
                                                  D -> P   Verified  all of it is
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.api.errors import TransferError
from kvconnector.base import HandoffRecord

MAX_TEXT_CHARS = 4096

# What the wire's own types (and ours) can hold; a peer may send anything.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ByteCount = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
BlockIds = Annotated[list[int], msgspec.Meta(max_length=2**20)]
Places = Annotated[list[Count], msgspec.Meta(max_length=4096)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every message names the process start that sent it."""

    engine_id: Name


class _RequestMessage(_Message, frozen=True, kw_only=True):
    request_id: Name
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Hello(_Message, frozen=True, kw_only=True):
    """P asks whether D knows it and is awake.

    ``sent_at_s`` is of P's own clock. D sends it back and makes nothing of it. ``test`` is the
    number of the self-test that P wants to do, each time a higher one.
    """

    sent_at_s: float = 0.0
    test: Count = 0


class HelloAck(_Message, frozen=True, kw_only=True):
    """D does. For self-test ``test`` P may write into ``slot``; None: not now."""

    sent_at_s: float = 0.0
    test: Count = 0
    slot: Count | None = None


class SelfTest(_Message, frozen=True, kw_only=True):
    """P has written, and all of it is complete; ``digest`` is of what D must find in its slot."""

    test: Count
    digest: Digest
    transport: Text
    bandwidth_bytes_per_s: float
    duration_s: float
    sent_at_s: float = 0.0


class SelfTestResult(_Message, frozen=True, kw_only=True):
    """D has looked; ``problem`` is empty if what it found is right."""

    test: Count
    problem: Text = ""
    sent_at_s: float = 0.0


class Start(_RequestMessage, frozen=True, kw_only=True):
    """P began to compute a prompt of ``num_tokens`` tokens."""

    num_tokens: Count


class Grant(_RequestMessage, frozen=True, kw_only=True):
    """P may write the prompt's blocks, from ``first_block`` on, into these blocks of D, in order.

    ``first_block`` counts the blocks that travel (`BlockPush.first_block`); D has those before it.
    """

    block_ids: BlockIds  # checked against the peer's blocks where they are used
    first_block: Count = 0


class Watermark(_RequestMessage, frozen=True, kw_only=True):
    """Tokens up to ``num_tokens`` are complete in D's memory: the first ``num_blocks`` granted."""

    num_tokens: Count
    num_blocks: Count = 0


class Commit(_RequestMessage, frozen=True, kw_only=True):
    """Everything is complete in D's memory, and ``record`` is what D goes on from.

    The rest is how it travelled.
    """

    record: HandoffRecord
    num_bytes: ByteCount
    num_blocks: Count
    transport: Text
    exposed_transfer_s: Seconds
    num_descriptors: Count = 0
    posting_s: Seconds = 0.0


class Cancel(_RequestMessage, frozen=True, kw_only=True):
    """D wants nothing more of this request; P answers Quiet."""


class Quiet(_RequestMessage, frozen=True, kw_only=True):
    """P has nothing posted for this request and will post nothing more."""

    reason: Text


class Beat(_Message, frozen=True, kw_only=True):
    """P lives; D answers with the same, which renews P's lease to write into D's memory.

    ``sent_at_s`` is of P's own clock, as in `Hello`: a lease is as old as the beat that D
    answered, however long the answer has lain in a queue.
    """

    sent_at_s: float = 0.0


class Digests(_RequestMessage, frozen=True, kw_only=True):
    """Keyed digests of what P wrote into these of the granted blocks; the writes are complete.

    ``attempt`` counts how often D has asked for them again. ``first_number`` is that of the first
    digest; each has the next one, and no number ever comes again.
    """

    indices: Places
    digests: Annotated[bytes, msgspec.Meta(max_length=2**16)]
    layers: tuple[Count, Count] | None = None  # None: all of them
    attempt: Count = 0
    first_number: ByteCount = 0


class Resend(_RequestMessage, frozen=True, kw_only=True):
    """Ask P to write blocks again, as their content differs from P's digests."""

    indices: Places
    layers: tuple[Count, Count]
    attempt: Count


class Verified(_RequestMessage, frozen=True, kw_only=True):
    """D has compared everything, and asks for nothing more: P may let go of its blocks."""


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
    """Decode a message; raise TransferError if the bytes are none of our messages."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(f"not a message of this protocol: {error}") from error
