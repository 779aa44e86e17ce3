"""Repeats: the messages that one end of the hand-off sends again until they are answered.

Refuses to know: what the messages mean, how they are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvconnector.base import TransferKey
from kvconnector.protocol.messages import Message

REPEAT_S = 1.0
# Seconds after which a message is tried again if it was not sent because a queue was full
RETRY_S = 0.2


@dataclass(slots=True)
class Repeat:
    """A message that is sent again and again until it is answered."""

    engine_id: str
    message: Message
    next_at: float


class Repeats:
    """All messages that one end repeats; at most one per transfer."""

    def __init__(self) -> None:
        self._repeats: dict[TransferKey, Repeat] = {}
        self._next_at = math.inf  # no message must be repeated before this time

    def __len__(self) -> int:
        return len(self._repeats)

    def add_message(self, key: TransferKey, engine_id: str, message: Message, now: float) -> None:
        """Repeat ``message`` every ``REPEAT_S`` seconds from now on."""
        self._repeats[key] = Repeat(engine_id, message, now + REPEAT_S)
        self._next_at = min(self._next_at, now + REPEAT_S)

    def put_off(self, key: TransferKey, engine_id: str, now: float) -> None:
        """Postpone the next repeat, because the peer has just sent a message about the transfer."""
        repeat = self._repeats.get(key)
        if repeat is not None and repeat.engine_id == engine_id:
            repeat.next_at = now + REPEAT_S

    def retry(self, key: TransferKey, engine_id: str, now: float) -> None:
        """Repeat a transfer's message after ``RETRY_S`` seconds, because it was not sent now."""
        repeat = self._repeats.get(key)
        if repeat is not None and repeat.engine_id == engine_id:
            repeat.next_at = now + RETRY_S
            self._next_at = min(self._next_at, repeat.next_at)

    def remove(self, key: TransferKey, engine_id: str) -> None:
        """Stop repeating a transfer's message.

        Do nothing if no message of this transfer is repeated.
        """
        repeat = self._repeats.get(key)
        if repeat is not None and repeat.engine_id == engine_id:
            del self._repeats[key]

    def has_peer(self, engine_id: str) -> bool:
        """Return whether a message to this peer is repeated."""
        return any(repeat.engine_id == engine_id for repeat in self._repeats.values())

    def remove_peer(self, engine_id: str) -> None:
        """Stop repeating all messages to a lost peer."""
        for key in [k for k, repeat in self._repeats.items() if repeat.engine_id == engine_id]:
            del self._repeats[key]

    def take_due(self, now: float) -> list[tuple[TransferKey, Repeat]]:
        """Return the messages to repeat now. Takes O(1) while no message is due."""
        if now < self._next_at:
            return []
        due = [(key, repeat) for key, repeat in self._repeats.items() if now >= repeat.next_at]
        for _, repeat in due:
            repeat.next_at = now + REPEAT_S
        self._next_at = min((r.next_at for r in self._repeats.values()), default=math.inf)
        return due
