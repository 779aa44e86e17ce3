"""BlockKey: makes keyed digests of KV blocks, on the wire and in files. Knows no peer, no file."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
DIGEST_BYTES = 16


class BlockKey:
    """Makes keyed digests of KV blocks: GMAC (NIST SP 800-38D) with AES-256.

    GMAC was the fastest MAC measured (docs/adr/0025-keyed-digests.md). Each number may be used only
    once per key.
    """

    def __init__(self, key: bytes) -> None:
        self.secret = key  # the node's other ranks get the key, too
        self._aead = AESGCM(key)

    def digest(self, number: int, context: bytes, data: memoryview) -> bytes:
        """Return the digest of the data and its context, in ``DIGEST_BYTES`` bytes."""
        # Only the short context is encrypted; the data is authenticated without a copy.
        return self._aead.encrypt(number.to_bytes(12, "big"), context, data)[-DIGEST_BYTES:]
