"""KVNetwork: what simulated prefill and decode nodes say to each other, inside one process.

The messages are those of the hand-off (docs/protocol), less the blocks: Start, Grant, Commit, and
the ends of both sides. Nothing is lost here unless a node is; a message to a node that is gone
vanishes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from baton.api.outputs import PushReceipt

TRANSPORT = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMessage:
    """One message about one attempt at a request; ``engine_id`` is the sender's."""

    request_id: str
    epoch: int
    engine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStart(KVMessage):
    """P to D: blocks are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGrant(KVMessage):
    """D to P: they are there; the first ``num_cached_tokens`` need not travel."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCommit(KVMessage):
    """P to D: all has arrived, and this is the next token."""

    token_id: int
    receipt: PushReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEnd(KVMessage):
    """Either way: the sender has given up on the hand-off."""


class KVNetwork:
    """The nodes of one process by engine id."""

    def __init__(self) -> None:
        self._mark = f"sim:{secrets.token_hex(8)}:".encode()
        self._inboxes: dict[str, Callable[[KVMessage], None]] = {}

    def add(self, engine_id: str, inbox: Callable[[KVMessage], None]) -> bytes:
        """Take a node in; returns its peer info."""
        self._inboxes[engine_id] = inbox
        return self._mark + engine_id.encode()

    def remove(self, engine_id: str) -> None:
        self._inboxes.pop(engine_id, None)

    def problem(self, peer_info: bytes) -> str:
        """Why a peer cannot be reached; empty when it can."""
        if peer_info.startswith(self._mark):
            return ""
        return "simulated nodes reach only peers of the same sim-node process"

    def send(self, engine_id: str, message: KVMessage) -> None:
        inbox = self._inboxes.get(engine_id)
        if inbox is not None:
            inbox(message)
