"""Block hashes: identify full KV blocks by everything that their content depends on.

    namespace    what equal tokens' KV depends on in a node: model, weights, dtypes, layout
    extra keys   what it depends on in a request: the group that shares its KV, the adapter

    hash[-1] = H(namespace, extra keys)        hash[i] = H(hash[i - 1], tokens of block i)

Hashes are chained, so equal hashes mean equal prefixes of one model under equal extra keys. With
another cache salt or other weights all hashes of a prompt differ. All code that identifies cached
KV uses this file: nodes' caches, their events to routers, and a router's index. The router computes
the same hashes to find nodes that have a prefix, so this file is torch-free and its result is part
of the protocol.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import xxhash

from baton.api.errors import ConfigError

BlockHash = bytes
ShortHash = int  # the first 64 bits: enough to choose a node by, too few to reuse KV by

HASH_ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {
    "blake2b": lambda data: hashlib.blake2b(data, digest_size=32).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128": xxhash.xxh3_128_digest,
}
DEFAULT_HASH_ALGORITHM = "blake2b"
_ROOT = b"baton/2"


def shorten(hashes: Iterable[BlockHash]) -> tuple[ShortHash, ...]:
    """Cut each hash to its first 8 bytes.

    The chance that any two of a million blocks collide is 1 in 30 million. A collision is harmless:
    the router misjudges how much of a prompt a node has, while the node compares whole hashes. An
    attacker can find two colliding prompts of its own after some 2**32 hashes, but gains only a
    wrong estimate for its own requests. It cannot target other tenants, whose hashes use an unknown
    salt.
    """
    parts = [block_hash[:8] for block_hash in hashes]
    return struct.unpack(f"<{len(parts)}Q", b"".join(parts))


# Entries of `NodeRegistration.compatibility` that equal tokens' KV depends on. Scales and layer
# kinds are part of the layout; the number of ranks does not matter.
CACHE_KEYS = (
    "model", "weights", "dtype", "linear_weights", "kv_cache_dtype", "kv_layout", "drafter",
)  # fmt: skip


def cache_namespace(entries: Mapping[str, str]) -> bytes:
    """Return a digest of what equal tokens' KV depends on in a node.

    Args:
        entries: compatibility entries; a missing one counts as empty.
    """
    fields = [f"{key}={entries.get(key, '')}".encode() for key in CACHE_KEYS]
    return hashlib.blake2b(_framed(fields), digest_size=16).digest()


def extra_keys_of(cache_salt: bytes, adapter: str = "") -> tuple[bytes, ...]:
    """Return the values, besides tokens, that a request's KV depends on.

    Args:
        cache_salt: salt of the group that shares the cache; empty: everybody shares.
        adapter: digest of the request's adapter; empty: the base model.
    """
    salted = (b"cache_salt", cache_salt) if cache_salt else ()
    return (*salted, b"adapter", adapter.encode()) if adapter else salted


class BlockHasher:
    """Compute the hashes of full blocks of token sequences.

    Args:
        block_size: tokens per block.
        algorithm: a name in HASH_ALGORITHMS. blake2b and sha256 resist an attacker who chooses
            prompts to collide with another user's; xxh3_128 does not.
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
        self.block_size = block_size
        self._digest = HASH_ALGORITHMS[algorithm]
        self._namespace = namespace
        self._pack = struct.Struct(f"<{block_size}I").pack  # 32 bits each, little-endian

    def extend(
        self, hashes: list[BlockHash], token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()
    ) -> None:
        """Append the hashes of the full blocks of ``token_ids`` that ``hashes`` lacks.

        Args:
            hashes: hashes of the sequence's first ``len(hashes)`` blocks.
            extra_keys: other facts that the KV depends on; see `extra_keys_of`.
        """
        size = self.block_size
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else self._root(extra_keys)
            hashes.append(self._digest(parent + self._pack(*token_ids[start : start + size])))

    def _root(self, extra_keys: Sequence[bytes]) -> bytes:
        return self._digest(_ROOT + _framed((self._namespace, *extra_keys)))


def _framed(fields: Iterable[bytes]) -> bytes:
    """Join fields with length prefixes, so that ("ab", "c") and ("a", "bc") differ."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
