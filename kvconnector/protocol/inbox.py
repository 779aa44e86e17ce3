"""Inbox: one queue of received messages per peer; the queues are read in turns.

The seal (MAC) of a message is checked on arrival, so no process can fill another peer's queue.
Refused messages are counted, and logged at intervals. Each peer gets a fair share of each round and
of the inbox's memory.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from baton.api.errors import TransferError
from kvconnector.protocol import messages
from kvconnector.protocol.messages import Message
from kvconnector.protocol.seals import Channels, Refusal, RefusedMessageError

logger = logging.getLogger(__name__)

# Maximum number of bytes of one message; a grant of a million blocks is shorter
MAX_MESSAGE_BYTES = 8 * 2**20
# Maximum number of bytes of one peer's waiting messages, not counting the first message
MAX_KEPT_BYTES = 16 * 2**20
OVERHEAD_BYTES = 256  # bytes added to each message's length when a queue's size is computed
MESSAGES_PER_TURN = 64
WARN_INTERVAL_S = 10.0


@dataclass(slots=True)
class _Queue:
    bodies: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0


class Inbox:
    """Keeps the messages from all peers of one end until the messages are read.

    Args:
        peers: engine ids whose messages are accepted.
        channels: check and open the sealed messages.
    """

    def __init__(self, peers: Container[str], channels: Channels) -> None:
        self._peers = peers
        self._channels = channels
        self._queues: dict[str, _Queue] = {}  # peers whose queue is not empty
        self._num_refused: Counter[Refusal] = Counter()
        self._num_told = 0
        self._warn_at = -math.inf

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def num_refused(self) -> Mapping[Refusal, int]:
        """Return how many messages were refused, by reason; thread-safe."""
        return self._num_refused.copy()

    def put(self, sender: str, payload: bytes, now: float) -> None:
        """Queue a message, or refuse it.

        Args:
            sender: the sender's engine id according to the transport. Some transports pass on an
                engine id that the sender only claims.
        """
        try:
            self._put(sender, payload)
        except RefusedMessageError as error:
            self._refuse(error.reason, sender, now)

    def pop_round(self, now: float) -> list[Message]:
        """Remove and return one round's messages: some from each peer, in order of arrival."""
        taken = []
        for sender, queue in list(self._queues.items()):
            for body in itertools.islice(queue.bodies, MESSAGES_PER_TURN):
                queue.num_bytes -= len(body) + OVERHEAD_BYTES
                message = self._decode(sender, body, now)
                if message is not None:
                    taken.append(message)
            if len(queue.bodies) <= MESSAGES_PER_TURN:
                del self._queues[sender]
            else:
                for _ in range(MESSAGES_PER_TURN):
                    queue.bodies.popleft()
        return taken

    def _put(self, sender: str, payload: bytes) -> None:
        is_peer = sender in self._peers
        if not is_peer and sender not in self._channels:
            raise RefusedMessageError(Refusal.STRANGER)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise RefusedMessageError(Refusal.TOO_LONG)
        body = self._channels[sender].open(payload)
        if not is_peer:  # may come from a peer that hung, and does not know that it was removed
            raise RefusedMessageError(Refusal.LEFT)
        queue = self._queues.setdefault(sender, _Queue())
        if queue.num_bytes > MAX_KEPT_BYTES:
            raise RefusedMessageError(Refusal.FLOOD)
        queue.bodies.append(body)
        queue.num_bytes += len(body) + OVERHEAD_BYTES

    def _decode(self, sender: str, body: bytes, now: float) -> Message | None:
        try:
            message = messages.decode(body)
        except TransferError:
            self._refuse(Refusal.MALFORMED, sender, now)
            return None
        if message.engine_id != sender:  # the message claims to be from another sender
            self._refuse(Refusal.FORGED, sender, now)
            return None
        return message

    def _refuse(self, reason: Refusal, sender: str, now: float) -> None:
        self._num_refused[reason] += 1
        if now < self._warn_at:
            return
        self._warn_at = now + WARN_INTERVAL_S
        total = self._num_refused.total()
        logger.warning(
            "dropped %d messages, the last of them in the name of %.100r: %s",
            total - self._num_told,
            sender,
            reason.value,
        )
        self._num_told = total
