"""Block hashes: identify full KV blocks by everything that their contents depend on.

    namespace    facts about the node: model, weights, dtypes, layout
    extra keys   facts about the request: the group that shares its KV, the adapter

    hash[-1] = H(namespace, extra keys)        hash[i] = H(hash[i - 1], tokens of block i, images)

Hashes are chained, so equal hashes mean equal prefixes with equal namespace and extra keys. Another
cache salt or other weights change all hashes of a prompt. Placeholders of all images are the same
token, so a block's hash also covers the digests of the images that lie in the block, and where each
image begins. All code that identifies cached KV uses this file: nodes' caches, their events to
routers, and the routers' index. A router computes the hashes of a prompt to find nodes that have a
prefix, so this file needs no torch, and its results are part of the protocol.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import xxhash

from baton.api.errors import ConfigError
from baton.api.images import ImageSpan

BlockHash = bytes
ShortHash = int  # a hash's first 64 bits: enough to choose a node, too few to reuse KV

HASH_ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {
    "blake2b": lambda data: hashlib.blake2b(data, digest_size=32).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128": xxhash.xxh3_128_digest,
}
DEFAULT_HASH_ALGORITHM = "blake2b"
_ROOT = b"baton/2"
_OFFSET = struct.Struct("<i")  # image's offset in a block; negative if it began in an earlier block


def shorten(hashes: Iterable[BlockHash]) -> tuple[ShortHash, ...]:
    """Cut each hash to its first 8 bytes.

    The chance that any two of a million blocks collide is 1 in 30 million. A collision is harmless:
    the router misjudges how much of a prompt a node has, but the node compares whole hashes. An
    attacker can find two colliding prompts of its own in some 2**32 hashes, but gains only a wrong
    estimate for its own requests. Other tenants' hashes depend on a salt that the attacker does not
    know.
    """
    parts = [block_hash[:8] for block_hash in hashes]
    return struct.unpack(f"<{len(parts)}Q", b"".join(parts))


# Entries of `NodeRegistration.compatibility` that change the KV of a prompt. The entry of the
# layout includes the scales of quantized KV and the kinds of layers. The number of ranks is no
# entry, because the number does not change KV.
CACHE_KEYS = (
    "model", "weights", "dtype", "linear_weights", "kv_cache_dtype", "kv_layout", "drafter",
)  # fmt: skip


def cache_namespace(entries: Mapping[str, str]) -> bytes:
    """Return a digest of a node's properties; KV is reusable only between nodes with equal digests.

    Args:
        entries: compatibility entries; a missing entry counts as an empty text.
    """
    fields = [f"{key}={entries.get(key, '')}".encode() for key in CACHE_KEYS]
    return hashlib.blake2b(_framed(fields), digest_size=16).digest()


def extra_keys_of(cache_salt: bytes, adapter: str = "") -> tuple[bytes, ...]:
    """Return the values, besides tokens, on which a request's KV depends.

    Args:
        cache_salt: salt of the group of requests that share cached KV; empty: all requests without
            a salt share cached KV.
        adapter: digest of the request's adapter; empty: the base model.
    """
    salted = (b"cache_salt", cache_salt) if cache_salt else ()
    return (*salted, b"adapter", adapter.encode()) if adapter else salted


class BlockHasher:
    """Computes the hashes of full blocks of token sequences.

    Args:
        block_size: tokens per block.
        algorithm: a name in HASH_ALGORITHMS. An attacker who chooses prompts can make xxh3_128
            collide with another user's prompt, but not blake2b or sha256.
        namespace: the cache namespace of the blocks' node; see `cache_namespace`.
    """

    def __init__(
        self,
        block_size: int,
        algorithm: str = DEFAULT_HASH_ALGORITHM,
        namespace: bytes = b"",
    ) -> None:
        if algorithm not in HASH_ALGORITHMS:
            known = ", ".join(HASH_ALGORITHMS)
            raise ConfigError(f"prefix_hash: must be one of {known}, got {algorithm!r}")
        self.block_size, self.algorithm = block_size, algorithm
        self._digest = HASH_ALGORITHMS[algorithm]
        self.namespace = namespace
        self._pack = struct.Struct(f"<{block_size}I").pack  # 32 bits each, little-endian

    def in_namespace(self, namespace: bytes) -> BlockHasher:
        """Return a hasher with the same block size and algorithm, but another namespace."""
        return BlockHasher(self.block_size, self.algorithm, namespace)

    def extend(
        self,
        hashes: list[BlockHash],
        token_ids: Sequence[int],
        extra_keys: Sequence[bytes] = (),
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Append to ``hashes`` the missing hashes of full blocks of ``token_ids``.

        Args:
            hashes: hashes of the sequence's first ``len(hashes)`` blocks.
            extra_keys: values from `extra_keys_of`.
            images: the sequence's images, in order.
        """
        size = self.block_size
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else self._root(extra_keys)
            content = self._pack(*token_ids[start : start + size])
            if images:
                content += _framed(_images_within(images, start, start + size))
            hashes.append(self._digest(parent + content))

    def _root(self, extra_keys: Sequence[bytes]) -> bytes:
        return self._digest(_ROOT + _framed((self.namespace, *extra_keys)))


def _images_within(images: Iterable[ImageSpan], start: int, end: int) -> Iterator[bytes]:
    """Yield, for each image in a block of tokens, its digest and where it begins in the block."""
    for span in images:
        if span.first < end and span.end > start:
            yield span.digest + _OFFSET.pack(span.first - start)


def _framed(fields: Iterable[bytes]) -> bytes:
    """Join fields, each after its length, so that ("ab", "c") and ("a", "bc") differ."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
