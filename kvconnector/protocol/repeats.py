"""Repeats: messages that are sent again until they are answered or no longer needed.

Without repeats, a message that is lost without an error would hold its request until the deadline.
Every repeated message is idempotent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvconnector.base import TransferKey
from kvconnector.protocol.messages import Message

REPEAT_S = 1.0


@dataclass(slots=True)
class Repeat:
    """One message that waits for its answer."""

    engine_id: str
    message: Message
    next_at: float


class Repeats:
    """All repeated messages of one end, at most one per transfer."""

    def __init__(self) -> None:
        self._repeats: dict[TransferKey, Repeat] = {}
        self._next_at = math.inf  # no message is due before this time

    def __len__(self) -> int:
        return len(self._repeats)

    def add_message(self, key: TransferKey, engine_id: str, message: Message, now: float) -> None:
        """Send ``message`` again every ``REPEAT_S``."""
        self._repeats[key] = Repeat(engine_id, message, now + REPEAT_S)
        self._next_at = min(self._next_at, now + REPEAT_S)

    def put_off(self, key: TransferKey, engine_id: str, now: float) -> None:
        """Postpone the repeat: the peer has just sent a message about this transfer."""
        repeat = self._repeats.get(key)
        if repeat is not None and repeat.engine_id == engine_id:
            repeat.next_at = now + REPEAT_S

    def remove(self, key: TransferKey, engine_id: str) -> None:
        """Stop repeating a message; do nothing if none is repeated to this peer."""
        repeat = self._repeats.get(key)
        if repeat is not None and repeat.engine_id == engine_id:
            del self._repeats[key]

    def remove_peer(self, engine_id: str) -> None:
        """Forget all messages to a peer that is gone."""
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
