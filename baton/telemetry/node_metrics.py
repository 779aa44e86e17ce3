"""What a node counts of its hand-offs and its peers, as plain values. Knows no exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class TransferOutcome(Enum):
    """How a transfer that had started ended."""

    COMMITTED = "committed"
    FAILED = "failed"  # its client was told
    CANCELLED = "cancelled"  # nobody waits for it any more


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffMetrics:
    """Metrics of a prefill node's push tracker or a decode node's reservations.

    Attributes:
        open: transfers by state.
        ended: transfers by outcome, since the node started.
        num_quarantined_blocks: of ended requests, that a peer may still write (D) or read (P).
        received_bytes: of committed transfers; 0 on a prefill node.
    """

    open: Mapping[str, int]
    ended: Mapping[TransferOutcome, int]
    num_quarantined_blocks: int
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorMetrics:
    """Metrics of one end of the KV connector.

    Attributes:
        pairs: peers by state and path of their bytes.
        connections: peers to which a connection is open, including kept peers that have gone.
        peer_failures: times that a peer was found to be silent or out of reach.
        sent_bytes, sent_blocks: posted, what had to be sent again included; 0 on a decode node.
        descriptors: ranges that these were posted as.
        posting_s: time in posting them.
        wrong_blocks: arrived with another digest than they were sent with.
        refused_messages: that were not heard, by reason.
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
