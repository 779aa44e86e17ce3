"""Messages and peer infos without seals, as a transport makes them, for tests of transports."""

from __future__ import annotations

import msgspec

from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.messages import Message, encode
from kvconnector.protocol.pair_keys import KeyPair
from kvconnector.protocol.seals import HEADER_BYTES


def unsealed(message: Message) -> bytes:
    """Put a payload into the frame of a sealed message, without a valid seal."""
    return bytes(HEADER_BYTES) + encode(message)


def with_key(info: PeerInfo) -> PeerInfo:
    """A transport's peer info as an end of the connector presents it."""
    return msgspec.structs.replace(info, public_key=KeyPair().public)
