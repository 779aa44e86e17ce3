"""Seals: every message carries a MAC of its pair and direction, and a number that comes once.

    tag, 16 bytes | number, 8 bytes | message          tag = BLAKE2b(key of the direction)

So a message is what this peer said to us, in this life of both, and is heard once: what is forged,
altered, cut short, of another pair, sent back to its author or heard before is refused. What is
refused is like a lost message; the protocol says again what matters, with a new number.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Container, Iterator
from enum import Enum

from baton.api.errors import TransferError
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.messages import Message, decode
from kvconnector.protocol.pair_keys import KeyPair, PairKeys

TAG_BYTES = 16
NUMBER_BYTES = 8
HEADER_BYTES = TAG_BYTES + NUMBER_BYTES
# A message that so many later ones of its sender have overtaken is taken for lost.
WINDOW = 4096
_WINDOW_BITS = (1 << WINDOW) - 1
# Channels of peers that left are kept, as they may come back and their messages with them.
MAX_CHANNELS = 4096


class Refusal(Enum):
    """Why a message was not heard."""

    STRANGER = "stranger"  # we know nobody of that name, or do not know it yet
    LEFT = "left"  # from a peer that our router has lost, and that does not know it yet
    TOO_LONG = "too long"
    FORGED = "forged"  # not from that peer to us, or altered, or cut short
    REPLAYED = "replayed"  # heard before, or much later than what followed it
    MALFORMED = "malformed"  # from that peer, and no message of ours
    FLOOD = "flood"  # more than we keep for one peer


class RefusedMessageError(TransferError):
    """A message that must not be heard."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.value)
        self.reason = reason


class ReplayWindow:
    """Which numbers have come (RFC 4303, 3.4.3): each is taken once, in any order, if not late."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0  # bit i: highest - i has come

    def take(self, number: int) -> bool:
        """Whether this number comes for the first time and not too late."""
        ahead = number - self._highest
        if ahead > 0:
            kept = self._seen << ahead if ahead < WINDOW else 0
            self._seen = (kept | 1) & _WINDOW_BITS
            self._highest = number
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class Channel:
    """What we say to one peer and hear from it.

    Args:
        public_key: of the peer.
        keys: shared with it.
        numbers: of messages; never the same one twice, whoever they are for.
    """

    def __init__(self, public_key: bytes, keys: PairKeys, numbers: Iterator[int]) -> None:
        self.public_key = public_key
        self.keys = keys
        self._numbers = numbers
        self._window = ReplayWindow()

    def seal(self, body: bytes) -> bytes:
        numbered = next(self._numbers).to_bytes(NUMBER_BYTES, "big") + body
        return _tag(self.keys.send, numbered) + numbered

    def open(self, payload: bytes) -> bytes:
        """The message's bytes; raises RefusedMessageError unless they are new and the peer's."""
        numbered = payload[TAG_BYTES:]
        tag = _tag(self.keys.receive, numbered)
        if len(payload) < HEADER_BYTES or not hmac.compare_digest(tag, payload[:TAG_BYTES]):
            raise RefusedMessageError(Refusal.FORGED)
        if not self._window.take(int.from_bytes(numbered[:NUMBER_BYTES], "big")):
            raise RefusedMessageError(Refusal.REPLAYED)
        return numbered[NUMBER_BYTES:]


class Channels:
    """The channels of one process start.

    Args:
        own_id: engine id of this end.
    """

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._key_pair = KeyPair()
        self._numbers = itertools.count(1)
        self._channels: dict[str, Channel] = {}

    @property
    def public_key(self) -> bytes:
        """Ours, for peers."""
        return self._key_pair.public

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._channels

    def __getitem__(self, engine_id: str) -> Channel:
        return self._channels[engine_id]

    def learn(self, peer: PeerInfo, present: Container[str] = ()) -> None:
        """Agree on keys with a peer, once in its life and ours.

        Args:
            present: engine ids whose channels stay, however many others are learnt.

        Raises TransferError if its public key is none, or another than we knew: an engine id is of
        one process start.
        """
        known = self._channels.pop(peer.engine_id, None)
        if known is None:
            keys = self._key_pair.agree(self._own_id, peer.engine_id, peer.public_key)
            known = Channel(peer.public_key, keys, self._numbers)
            if len(self._channels) >= MAX_CHANNELS:
                gone = next((name for name in self._channels if name not in present), None)
                if gone is None:
                    raise TransferError(f"{len(self._channels)} peers are here, the most there may")
                del self._channels[gone]
        self._channels[peer.engine_id] = known  # the latest learnt is the last to go
        if known.public_key != peer.public_key:
            raise TransferError(f"{peer.engine_id} is known with another public key")


def peek(payload: bytes) -> Message:
    """What a sealed message says, whoever says it: for faults and tests, which may not care.

    Raises TransferError for anything that is none.
    """
    return decode(payload[HEADER_BYTES:])


def _tag(key: bytes, numbered: bytes) -> bytes:
    return hashlib.blake2b(numbered, key=key, digest_size=TAG_BYTES).digest()
