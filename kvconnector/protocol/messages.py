"""Messages between a prefill node (P) and a decode node (D): short, typed, checked when decoded.

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

If a message were lost for good, its request would wait until the request's deadline. So important
messages are sent again until they are answered or no longer needed (`repeats.py`); these messages
are idempotent.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.api.errors import TransferError
from kvconnector.base import HandoffRecord

MAX_TEXT_CHARS = 4096

# Types whose values are checked when a message is decoded, because peers are not trusted.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ByteCount = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
BlockIds = Annotated[list[int], msgspec.Meta(max_length=2**20)]
Indices = Annotated[list[Count], msgspec.Meta(max_length=4096)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages; ``engine_id`` is the engine id of the node that sends it."""

    engine_id: Name


class _RequestMessage(_Message, frozen=True, kw_only=True):
    request_id: Name
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Hello(_Message, frozen=True, kw_only=True):
    """The prefill node asks whether the decode node knows it and is responsive.

    Attributes:
        sent_at_s: time on the prefill node's clock, which the decode node returns unchanged.
        test: number of the self-test that the prefill node wants to run; each new test has a
            greater number.
    """

    sent_at_s: float = 0.0
    test: Count = 0


class HelloAck(_Message, frozen=True, kw_only=True):
    """The decode node knows the prefill node, which may write self-test ``test`` to ``slot``.

    If ``slot`` is None, the prefill node may not write a self-test now.
    """

    sent_at_s: float = 0.0
    test: Count = 0
    slot: Count | None = None


class SelfTest(_Message, frozen=True, kw_only=True):
    """The prefill node's test writes have ended; the slot's bytes must have this ``digest``."""

    test: Count
    digest: Digest
    transport: Text
    bandwidth_bytes_per_s: float
    duration_s: float
    sent_at_s: float = 0.0


class SelfTestResult(_Message, frozen=True, kw_only=True):
    """The decode node has checked the slot; ``problem`` is empty if the slot's bytes are right."""

    test: Count
    problem: Text = ""
    sent_at_s: float = 0.0


class Start(_RequestMessage, frozen=True, kw_only=True):
    """The prefill node began to compute a prompt of ``num_tokens`` tokens."""

    num_tokens: Count


class Grant(_RequestMessage, frozen=True, kw_only=True):
    """The prefill node may write the prompt's blocks, from ``first_block`` on, to ``block_ids``.

    ``first_block`` is an index among the prompt's transferred blocks; the decode node already has
    the earlier blocks. ``block_ids`` are the decode node's blocks, in the same order.
    """

    block_ids: BlockIds  # the prefill node refuses ids that are too large for the decode node
    first_block: Count = 0


class Watermark(_RequestMessage, frozen=True, kw_only=True):
    """``num_tokens`` tokens are complete on the decode node, in the first ``num_blocks`` blocks."""

    num_tokens: Count
    num_blocks: Count = 0


class Commit(_RequestMessage, frozen=True, kw_only=True):
    """A message: all blocks are in the decode node's memory; the node continues from ``record``.

    The other fields measure the transfer, for the request's receipt.
    """

    record: HandoffRecord
    num_bytes: ByteCount
    num_blocks: Count
    transport: Text
    exposed_transfer_s: Seconds
    num_descriptors: Count = 0
    posting_s: Seconds = 0.0


class Cancel(_RequestMessage, frozen=True, kw_only=True):
    """The decode node no longer wants this request's KV; the prefill node must answer Quiet."""


class Quiet(_RequestMessage, frozen=True, kw_only=True):
    """The prefill node has no write in flight for this request, and will post no more."""

    reason: Text


class Beat(_Message, frozen=True, kw_only=True):
    """The prefill node is alive; so is the decode node, which answers with a Beat of its own.

    The answer renews the prefill node's lease to write to the decode node's memory. ``sent_at_s``:
    time on the prefill node's clock, which the answer returns unchanged. The lease starts at this
    time, not when the answer arrives, because the answer may wait in a queue.
    """

    sent_at_s: float = 0.0


class Digests(_RequestMessage, frozen=True, kw_only=True):
    """The prefill node's keyed digests of granted blocks whose writes are complete.

    Attributes:
        indices: indexes of the blocks among the request's transferred blocks.
        layers: the written layers; None: all.
        attempt: how often the decode node has requested these blocks again; 0: the first write.
        first_number: number of the first digest; the next digests have consecutive numbers. The
            prefill node never uses a number twice.
    """

    indices: Indices
    digests: Annotated[bytes, msgspec.Meta(max_length=2**16)]
    layers: tuple[Count, Count] | None = None
    attempt: Count = 0
    first_number: ByteCount = 0


class Resend(_RequestMessage, frozen=True, kw_only=True):
    """The prefill node must write blocks again, because their content differs from its digests."""

    indices: Indices
    layers: tuple[Count, Count]
    attempt: Count


class Verified(_RequestMessage, frozen=True, kw_only=True):
    """The decode node found all blocks right; the prefill node may release its blocks."""


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
    """Decode a message; raise TransferError if the bytes are not a valid message."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(f"not a message of this protocol: {error}") from error
