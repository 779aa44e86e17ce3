"""Messages between a node's leading process and the transports of the node's other ranks.

The messages are plain values in msgpack, sent over a private connection. The rank answers each call
with one `Answer` before it reads the next message, and reports each ended write with `Ended`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnector.blocks import LayerRange
from kvconnector.peer_info import RankMemory


class Open(msgspec.Struct, frozen=True):
    """The first message to a rank: open a transport of this kind for this node.

    Attributes:
        address: socket to which the rank connects for this transport; empty: the rank uses its
            first connection.
    """

    connector: str
    engine_id: str
    address: str = ""


class Learn(msgspec.Struct, tag=True, frozen=True):
    """A call: connect to a peer. The answer is the name of the data path."""

    call: int
    peer: bytes


class Forget(msgspec.Struct, tag=True, frozen=True):
    """A message without an answer: disconnect from a peer."""

    engine_id: str


class WriteBlocks(msgspec.Struct, tag=True, frozen=True):
    """A write: post this rank's slices of these blocks; see `KVTransport.write`."""

    number: int
    engine_id: str
    local: list[int]
    remote: list[int]
    layers: LayerRange | None
    request_id: str
    epoch: int
    groups: list[int]


class WriteSlot(msgspec.Struct, tag=True, frozen=True):
    """A write: post this rank's part of a self-test; see `KVTransport.write_scratch`."""

    number: int
    engine_id: str
    slot: int


class LendSlot(msgspec.Struct, tag=True, frozen=True):
    """A call: clear a slot of this rank's scratch memory, to which a peer then writes."""

    call: int
    slot: int
    engine_id: str


class DigestSlot(msgspec.Struct, tag=True, frozen=True):
    """A call: compute and answer the digest of the bytes in a slot."""

    call: int
    slot: int


class DigestSlices(msgspec.Struct, tag=True, frozen=True):
    """A call: compute the digests of this rank's slices (`BlockDigests.of_slices`)."""

    call: int
    engine_id: str
    writes: bool
    block_ids: list[int]
    groups: list[int]
    layers: LayerRange
    numbers: list[int]
    contexts: list[bytes]
    key: bytes


class Permit(msgspec.Struct, tag=True, frozen=True):
    """A message without an answer: allow a peer to write these blocks."""

    engine_id: str
    request_id: str
    epoch: int
    block_ids: list[int]


class Prohibit(msgspec.Struct, tag=True, frozen=True):
    """A call: forbid a transfer's writes.

    The answer is whether none of these writes can arrive any more.
    """

    call: int
    engine_id: str
    request_id: str
    epoch: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The first message from a rank, sent when its transport is open: its memory's addresses."""

    memory: RankMemory


class Answer(msgspec.Struct, tag=True, frozen=True):
    """A rank's answer to a call; ``problem`` is the error that the call raised; empty: none."""

    call: int
    value: Any = None
    problem: str = ""


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A rank's report that a write is complete, or has failed and is no longer in flight."""

    number: int
    problem: str = ""


Call = Learn | LendSlot | DigestSlot | DigestSlices | Prohibit
ToRank = Call | Forget | WriteBlocks | WriteSlot | Permit
FromRank = Ready | Answer | Ended

ENCODER = msgspec.msgpack.Encoder()
OPEN = msgspec.msgpack.Decoder(Open)
TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
