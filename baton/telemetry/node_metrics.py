"""A node's counts of its hand-offs and peers, as plain values. Knows no exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class TransferOutcome(Enum):
    """How a started transfer ended."""

    COMMITTED = "committed"
    FAILED = "failed"  # the request's client was told
    CANCELLED = "cancelled"  # nobody waits for it any longer


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffMetrics:
    """Metrics of a prefill node's push tracker or a decode node's reservations.

    Attributes:
        open: transfers by state.
        ended: transfers by outcome, since the node started.
        num_quarantined_blocks: blocks of ended requests that a peer may still write (on a decode
            node) or read (on a prefill node).
        received_bytes: bytes of committed transfers; 0 on a prefill node.
    """

    open: Mapping[str, int]
    ended: Mapping[TransferOutcome, int]
    num_quarantined_blocks: int
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorMetrics:
    """Metrics of one end of the KV connector.

    Attributes:
        pairs: number of peers, by state and transport.
        connections: peers with an open connection, including departed peers whose connection is
            kept.
        peer_failures: how often a peer was silent or unreachable.
        sent_bytes, sent_blocks: posted writes, including repeated ones; 0 on a decode node.
        descriptors: memory ranges in these writes.
        posting_s: time in calls that post writes.
        wrong_blocks: blocks that arrived with a wrong digest.
        refused_messages: messages that were refused, by reason.
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
