"""KV connector: what prefill and decode nodes say to it, and what they hear.

Knows blocks and peers; knows no Request, no scheduler and no gRPC. The protocol (start, grant,
push, commit) is written once, in `protocol/`, over any transport (`transports/base.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec

from baton.api.outputs import PushReceipt
from baton.telemetry.node_metrics import TransferOutcome
from kvconnector.blocks import LayerRange

TransferKey = tuple[str, int]  # (request_id, epoch)
NO_TRANSFER: TransferKey = ("", 0)
HANDOFF_VERSION = 1
MAX_DRAFTS = 32  # in a record
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a decode node goes on from, beside the KV. All of it is listed here.

    A node ignores fields that it does not know and does without those that are absent. What it
    could not go on without needs another version.

    Attributes:
        version: of the record.
        num_tokens: whose KV has travelled: the position at which the next token stands.
        token_id: token 1, which stands there.
        draft_token_ids: what the prefill node guesses to come behind it.
    """

    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    token_id: TokenId
    draft_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_DRAFTS)] = ()
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = HANDOFF_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPush:
    """Blocks of one request that are full and may travel.

    Attributes:
        first_block: index, within the prompt's blocks that travel, of ``block_ids[0]``.
        num_tokens: prompt tokens that are complete once these blocks have arrived.
            Only with whole blocks: some layers of a block move no watermark.
        record: set in the last push of a request and only there.
        layers: which layers of the blocks; None: all of them.
        is_computed: whether a GPU is done with them, asked on the I/O thread; None: they are.
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
    """The grant: where a prefill node may write a prompt's blocks.

    Attributes:
        engine_id: of the prefill node it is for.
        block_ids: of the decode node, in order: one per block of the prompt that travels, from
            ``first_block`` on.
        first_block: how many of these the decode node has already.
        groups: of each block of the prompt that travels, those before ``first_block`` too, its KV
            group; empty: there is one.
    """

    request_id: str
    epoch: int
    engine_id: str
    block_ids: tuple[int, ...]
    first_block: int = 0
    groups: tuple[int, ...] = ()


class TransferEventKind(Enum):
    """What happened to a transfer or a peer."""

    PEER_CONNECTED = "peer connected"
    PEER_FAILED = "peer failed"
    PEER_DRAINED = "peer drained"  # receiver: of a dead peer nothing more can arrive
    STARTED = "started"  # receiver: the prefill node began to compute and wants a grant
    WATERMARK = "watermark"  # receiver: tokens up to `num_tokens` are complete
    COMMITTED = "committed"  # both: all blocks are complete; terminal
    FAILED = "failed"  # both: it ended otherwise, and the wire is quiet; terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """One event; fields that do not belong to its kind keep their defaults.

    A FAILED without a reason is one that the other end, or the own node, asked for.
    """

    kind: TransferEventKind
    engine_id: str
    request_id: str = ""
    epoch: int = 0
    num_tokens: int = 0
    record: HandoffRecord | None = None  # of a COMMITTED at the receiver
    receipt: PushReceipt | None = None
    transport: str = ""
    bandwidth_bytes_per_s: float = 0.0  # of a peer's self-test
    reason: str = ""

    @property
    def outcome(self) -> TransferOutcome:
        """Of a COMMITTED or FAILED."""
        if self.kind is TransferEventKind.COMMITTED:
            return TransferOutcome.COMMITTED
        return TransferOutcome.FAILED if self.reason else TransferOutcome.CANCELLED
