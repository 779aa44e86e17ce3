"""Seals: each message carries a MAC for its pair of ends and its direction, and a number.

    tag, 16 bytes | number, 8 bytes | message          tag = BLAKE2b(key of the direction)

The sender uses each number only once. An accepted message was sent to this node by this peer since
the last start of both, and was not accepted before. Forged, altered, shortened, reflected or
repeated messages, and messages between other nodes, are refused. A refused message counts as lost:
the protocol repeats important messages with a new number.
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
# A message is refused if its number is lower than its sender's highest accepted number by this
# much.
WINDOW = 4096
_WINDOW_BITS = (1 << WINDOW) - 1
# Maximum number of channels, including those of peers that the router has lost: these peers may
# return.
MAX_CHANNELS = 4096


class Refusal(Enum):
    """The reasons for which messages are refused."""

    STRANGER = "stranger"  # no known peer has this name
    LEFT = "left"  # the router has removed the sender
    TOO_LONG = "too long"
    FORGED = "forged"  # altered, or not from this peer to this node
    REPLAYED = "replayed"  # accepted before, or so late that this is unknown
    MALFORMED = "malformed"  # the message is this peer's, but cannot be decoded
    FLOOD = "flood"  # too many messages of this peer wait to be read


class RefusedMessageError(TransferError):
    """Raised for a message that is refused, with the reason."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.value)
        self.reason = reason


class ReplayWindow:
    """Accepts each message number once, in any order; refuses old numbers (RFC 4303, 3.4.3)."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0  # bit i is set if the number `highest - i` was accepted

    def accept_number(self, number: int) -> bool:
        """Accept a number; return False if the number was accepted before or is too low."""
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
    """Seals the messages to one peer, and opens the messages from this peer.

    Args:
        public_key: the peer's public key.
        keys: the keys that this end shares with the peer.
        numbers: yields a new number for each message that this end sends to any peer.
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
        """Return a message's content; raise RefusedMessageError unless it is new and authentic."""
        numbered = payload[TAG_BYTES:]
        tag = _tag(self.keys.receive, numbered)
        if len(payload) < HEADER_BYTES or not hmac.compare_digest(tag, payload[:TAG_BYTES]):
            raise RefusedMessageError(Refusal.FORGED)
        if not self._window.accept_number(int.from_bytes(numbered[:NUMBER_BYTES], "big")):
            raise RefusedMessageError(Refusal.REPLAYED)
        return numbered[NUMBER_BYTES:]


class Channels:
    """One end's channels to all its peers; new at each start of the process.

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
        """Return this end's public key, which is new at each start of the process."""
        return self._key_pair.public

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._channels

    def __getitem__(self, engine_id: str) -> Channel:
        return self._channels[engine_id]

    def learn(self, peer: PeerInfo, present: Container[str] = ()) -> None:
        """Derive the keys that are shared with a peer, if they are not known yet.

        Args:
            present: engine ids of present peers; their channels are kept when others are dropped
                because there are too many.

        Raises TransferError for a bad public key, or for a public key that differs from the peer's
        earlier one: an engine id has only one key.
        """
        known = self._channels.pop(peer.engine_id, None)
        if known is None:
            keys = self._key_pair.agree(self._own_id, peer.engine_id, peer.public_key)
            known = Channel(peer.public_key, keys, self._numbers)
            if len(self._channels) >= MAX_CHANNELS:
                gone = next((name for name in self._channels if name not in present), None)
                if gone is None:
                    raise TransferError(
                        f"{len(self._channels)} peers are connected, which is the maximum"
                    )
                del self._channels[gone]
        # Move the peer's channel to the end, so that this channel is dropped last.
        self._channels[peer.engine_id] = known
        if known.public_key != peer.public_key:
            raise TransferError(f"{peer.engine_id} is known with another public key")


def peek(payload: bytes) -> Message:
    """Decode a sealed message without checking its MAC; only for fault injection and tests.

    Raises TransferError for bytes that are no message.
    """
    return decode(payload[HEADER_BYTES:])


def _tag(key: bytes, numbered: bytes) -> bytes:
    return hashlib.blake2b(numbered, key=key, digest_size=TAG_BYTES).digest()
