"""Pair keys: secrets that two ends of the KV connector share.

Each process draws an X25519 key at its start. The public part is sent in `PeerInfo` over the
authenticated links to the router, which learns no secret from it. Each derived key is for one pair
of processes and one direction. The key does not authenticate messages of another pair, of an
earlier start of the same node, or of the other direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from baton.api.errors import TransferError
from baton.kv.block_key import KEY_BYTES, BlockKey

PUBLIC_KEY_BYTES = 32
_LABEL = b"baton kv 1"


@dataclass(frozen=True, slots=True)
class PairKeys:
    """The keys that one end shares with one peer.

    Attributes:
        send, receive: keys for messages to the peer, and from the peer.
        send_blocks, receive_blocks: keys for KV blocks to the peer, and from the peer.
    """

    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)
    send_blocks: BlockKey = field(repr=False)
    receive_blocks: BlockKey = field(repr=False)


class KeyPair:
    """The X25519 key pair of one process start; it is never stored."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, own_id: str, peer_id: str, peer_public: bytes) -> PairKeys:
        """Derive the keys that are shared with a peer; raise TransferError for a bad public key."""
        if len(peer_public) != PUBLIC_KEY_BYTES:
            raise TransferError(f"{peer_id} has no public key for KV messages")
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        # A public key of small order gives a shared secret that anybody can compute
        except ValueError as error:
            raise TransferError(f"{peer_id} has a bad public key for KV messages") from error
        there = (own_id.encode(), peer_id.encode(), self.public, peer_public)
        back = (peer_id.encode(), own_id.encode(), peer_public, self.public)
        return PairKeys(
            send=_derive(shared, b"message", *there),
            receive=_derive(shared, b"message", *back),
            send_blocks=BlockKey(_derive(shared, b"block", *there)),
            receive_blocks=BlockKey(_derive(shared, b"block", *back)),
        )


def _derive(shared: bytes, use: bytes, *parts: bytes) -> bytes:
    """Derive a key by HKDF-SHA256 (RFC 5869), bound to both ids and public keys, sender first."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (_LABEL, use, *parts))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(shared)
