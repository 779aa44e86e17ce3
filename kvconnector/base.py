"""The values that a node exchanges with its own KV connector: pushes, grants, events, metrics.

Refuses to know: `Request`, the scheduler, gRPC. The protocol between two connectors (start, grant,
push, commit) is written once, in `protocol/`, for all transports (`transports/base.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated

import msgspec

from baton.api.outputs import PushReceipt
from baton.kv.residency import SecondsHistogram
from kvconnector.blocks import LayerRange

TransferKey = tuple[str, int]  # (request_id, epoch)
NO_TRANSFER: TransferKey = ("", 0)
HANDOFF_VERSION = 1
MAX_DRAFTS = 32  # maximum number of draft tokens in a hand-off record
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The data that a decode node needs besides the KV to continue a request.

    For the encoding of an image, ``num_tokens`` is the number of its embeddings, and ``token_id``
    is unused. For a cached prefix, ``token_id`` is unused, too.

    The receiving node ignores unknown fields, and uses defaults for absent fields. A new field that
    the receiving node must not ignore therefore needs a new ``version``.

    Attributes:
        version: version of the record's format.
        num_tokens: number of tokens whose KV was sent; also the position of the first output token.
        token_id: the first output token, which the prefill node sampled.
        draft_token_ids: the prefill node's drafts of the tokens after the first output token.
        adapter: digest of the adapter that computed the KV; empty: the base model.
        image: digest of the image whose encoding was sent, in hexadecimal; empty: KV was sent.
        prefix: hash of the last block of a cached prefix that was sent, in hexadecimal; empty: a
            computed prompt or an encoding was sent.
        idle_ms: mean time since the last use of a cached prefix's blocks, in milliseconds.
    """

    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    token_id: TokenId
    draft_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_DRAFTS)] = ()
    adapter: Annotated[str, msgspec.Meta(max_length=64)] = ""
    image: Annotated[str, msgspec.Meta(max_length=64)] = ""
    prefix: Annotated[str, msgspec.Meta(max_length=64)] = ""
    idle_ms: Annotated[int, msgspec.Meta(ge=0, lt=2**40)] = 0
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = HANDOFF_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPush:
    """Full blocks of one request that the sender may write now.

    Attributes:
        first_block: index of ``block_ids[0]`` among the prompt's transferred blocks.
        num_tokens: prompt tokens that are complete once these blocks have arrived; 0 if the push
            covers only a part of the layers.
        record: the hand-off record; set only in the last push of a request.
        layers: the layers to write; None: all.
        is_computed: returns whether the GPU has computed these blocks by now; called on the I/O
            thread. None: the blocks were computed before the push.
    """

    request_id: str
    epoch: int
    first_block: int
    block_ids: tuple[int, ...]
    num_tokens: int = 0
    record: HandoffRecord | None = None
    layers: LayerRange | None = None
    is_computed: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReservation:
    """A decode node's grant: the blocks that a prefill node may write for one request.

    Attributes:
        engine_id: engine id of the prefill node that may write.
        block_ids: the decode node's blocks for the prompt's transferred blocks from ``first_block``
            on, in order.
        first_block: how many of the prompt's transferred blocks the decode node already has, and
            does not want to receive.
        groups: KV group of each transferred block of the prompt, including those before
            ``first_block``; empty: there is only one group.
    """

    request_id: str
    epoch: int
    engine_id: str
    block_ids: tuple[int, ...]
    first_block: int = 0
    groups: tuple[int, ...] = ()


class TransferEventKind(Enum):
    """Kinds of `TransferEvent`: what happened to a transfer or a peer."""

    PEER_CONNECTED = "peer connected"
    PEER_FAILED = "peer failed"
    PEER_DRAINED = "peer drained"  # receiver: the last bytes that a dead peer sent have arrived
    STARTED = "started"  # receiver: the prefill node began to compute, and wants a grant
    WATERMARK = "watermark"  # receiver: tokens up to `num_tokens` are complete
    COMMITTED = "committed"  # sender and receiver: all blocks have arrived; terminal
    FAILED = "failed"  # sender and receiver: failed, and no write is in flight; terminal


class TransferOutcome(Enum):
    """The ways in which a started transfer can end."""

    COMMITTED = "committed"
    FAILED = "failed"  # the client was told of the failure
    CANCELLED = "cancelled"  # no client waits for the request any more


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """An event of a transfer or a peer; unused fields keep their defaults.

    A FAILED event without a reason means that this node or the peer cancelled the transfer.
    """

    kind: TransferEventKind
    engine_id: str
    request_id: str = ""
    epoch: int = 0
    num_tokens: int = 0
    record: HandoffRecord | None = None  # set only in a receiver's COMMITTED event
    receipt: PushReceipt | None = None
    transport: str = ""
    bandwidth_bytes_per_s: float = 0.0  # measured by the self-test, or from KV later
    reason: str = ""

    @property
    def outcome(self) -> TransferOutcome:
        """Return how the transfer ended. Only COMMITTED and FAILED events have an outcome."""
        if self.kind is TransferEventKind.COMMITTED:
            return TransferOutcome.COMMITTED
        return TransferOutcome.FAILED if self.reason else TransferOutcome.CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffMetrics:
    """Metrics of a prefill node's push tracker or a decode node's reservations.

    Attributes:
        open: number of open transfers, by state.
        ended: number of ended transfers since the node started, by outcome.
        num_quarantined_blocks: number of blocks of ended requests that a peer may still write (on a
            decode node) or read (on a prefill node).
        received_bytes: bytes received in committed transfers; 0 on a prefill node.
        encodings_open: number of encodings that encode nodes are sending or may still write to this
            node; 0 on nodes that receive none.
        encodings_lost: number of images that this prefill node encoded itself because no encoding
            arrived from an encode node.
        fetches: numbers of cached prefixes that this node expected, received and lost so far.
        fetches_open: number of cached prefixes that this node sends, expects or has in quarantine.
        fetched_tokens, fetched_bytes: tokens and bytes of the received prefixes.
        fetched_ages: times from the last use of a received prefix's blocks until they were sent.
        shared_tokens: tokens of the prefixes that this node has sent completely.
    """

    open: Mapping[str, int]
    ended: Mapping[TransferOutcome, int]
    num_quarantined_blocks: int
    received_bytes: int = 0
    encodings_open: int = 0
    encodings_lost: int = 0
    fetches: Mapping[str, int] = field(default_factory=dict)
    fetches_open: int = 0
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetched_ages: SecondsHistogram = field(default_factory=SecondsHistogram)
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorMetrics:
    """Metrics of a sender or a receiver of KV.

    Attributes:
        pairs: number of peers, by state of the peer and by data path.
        connections: number of peers with an open connection, including departed peers whose
            connections are kept.
        peer_failures: how often a peer was reported as silent or unreachable.
        sent_bytes, sent_blocks: bytes and blocks of all posted writes, including repeated writes; 0
            on a decode node.
        descriptors: number of memory ranges in all posted writes.
        posting_s: seconds spent in calls that post writes.
        wrong_blocks: number of blocks that arrived with a wrong digest.
        refused_messages: number of refused messages, by reason.
    """

    pairs: Mapping[tuple[str, str], int]
    peer_failures: int
    connections: int = 0
    sent_bytes: int = 0
    sent_blocks: int = 0
    descriptors: int = 0
    posting_s: float = 0.0
    wrong_blocks: int = 0
    refused_messages: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class PushTotals:
    """Totals of the blocks, bytes and memory ranges that one sender has posted, for the metrics."""

    num_bytes: int = 0
    num_blocks: int = 0
    num_descriptors: int = 0
    posting_s: float = 0.0

    def add_to(self, metrics: ConnectorMetrics) -> ConnectorMetrics:
        return replace(
            metrics,
            sent_bytes=self.num_bytes,
            sent_blocks=self.num_blocks,
            descriptors=self.num_descriptors,
            posting_s=self.posting_s,
        )


@dataclass(frozen=True, slots=True)
class Portions:
    """Limits on the bytes that a sender posts at once, for one kind of memory (host or GPU).

    Attributes:
        write_bytes: maximum number of bytes of one write, so that aborts and other requests wait
            only briefly.
        in_flight_bytes: maximum number of bytes in flight to one peer. The I/O thread refills this
            budget only once per round, so the budget limits the bandwidth.
    """

    write_bytes: int
    in_flight_bytes: int


# A round takes about 0.2 ms, so these limits allow 160 GB/s from host memory, and 1.3 TB/s from
# GPUs over NVLink.
HOST_PORTIONS = Portions(write_bytes=8 * 2**20, in_flight_bytes=32 * 2**20)
DEVICE_PORTIONS = Portions(write_bytes=32 * 2**20, in_flight_bytes=256 * 2**20)
