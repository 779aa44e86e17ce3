"""Block hashes: names for full KV blocks that say everything their content depends on.

    namespace    what the KV of equal tokens depends on in a node: model, weights, dtypes, layout
    extra keys   and in a request: who shares its KV

    hash[-1] = H(namespace, extra keys)        hash[i] = H(hash[i - 1], tokens of block i)

Chained, so that equal hashes mean equal prefixes of one model under equal extra keys: with another
cache salt no block of a prompt has the same name, and with other weights neither. All that names
cached KV comes from here: nodes' caches, what they tell routers, a router's index. The router
computes the same hashes to find the node that has a prefix, so this file is torch-free and its
result is part of the contract.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import xxhash

from baton.api.errors import ConfigError

BlockHash = bytes
ShortHash = int  # 64 bits of a BlockHash: enough to place a request by, too little to reuse KV by

HASH_ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {
    "blake2b": lambda data: hashlib.blake2b(data, digest_size=32).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128": xxhash.xxh3_128_digest,
}
DEFAULT_HASH_ALGORITHM = "blake2b"
_ROOT = b"baton/2"


def shorten(hashes: Iterable[BlockHash]) -> tuple[ShortHash, ...]:
    """Cut each hash to its first 8 bytes.

    That any two of a million blocks share one is a chance of 1 in 30 million. It is harmless: a
    router then misjudges how much of a prompt a node has; the node itself goes by whole hashes.
    Who looks for two prompts of its own that share one finds them after some 2**32 hashes, and
    wins a wrong guess about its own requests. It cannot aim at another tenant's: their names come
    of a salt that it does not know.
    """
    parts = [block_hash[:8] for block_hash in hashes]
    return struct.unpack(f"<{len(parts)}Q", b"".join(parts))


# What nodes say of themselves (`NodeRegistration.compatibility`) on which the KV of equal tokens
# depends. Scales and kinds of layers are in the layout; the number of ranks is in none of them.
CACHE_KEYS = (
    "model", "weights", "dtype", "linear_weights", "kv_cache_dtype", "kv_layout", "drafter",
)  # fmt: skip


def cache_namespace(entries: Mapping[str, str]) -> bytes:
    """Digest what the KV of equal tokens depends on in a node, for `BlockHasher`.

    Args:
        entries: compatibility entries; a missing one counts as empty.
    """
    fields = [f"{key}={entries.get(key, '')}".encode() for key in CACHE_KEYS]
    return hashlib.blake2b(_framed(fields), digest_size=16).digest()


def extra_keys_of(cache_salt: bytes) -> tuple[bytes, ...]:
    """Return what a request's KV depends on besides its tokens, for `BlockHasher.extend`.

    Args:
        cache_salt: salt of the tenant or group that shares the cache; empty: everybody shares.
    """
    return (b"cache_salt", cache_salt) if cache_salt else ()


class BlockHasher:
    """Hashes of the full blocks of token sequences.

    Args:
        block_size: tokens per block.
        algorithm: a name in HASH_ALGORITHMS. blake2b and sha256 stand up to an attacker who
            chooses prompts to collide with another user's; xxh3_128 does not.
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
        self._pack = struct.Struct(f"<{block_size}I").pack  # 32 bits each, low bytes first

    def extend(
        self, hashes: list[BlockHash], token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()
    ) -> None:
        """Append the hashes of the full blocks of ``token_ids`` that ``hashes`` lacks.

        Args:
            hashes: hashes of the first ``len(hashes)`` blocks of the same sequence.
            extra_keys: other facts that the KV depends on; see `extra_keys_of`.
        """
        size = self.block_size
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else self._root(extra_keys)
            hashes.append(self._digest(parent + self._pack(*token_ids[start : start + size])))

    def _root(self, extra_keys: Sequence[bytes]) -> bytes:
        return self._digest(_ROOT + _framed((self._namespace, *extra_keys)))


def _framed(fields: Iterable[bytes]) -> bytes:
    """Length-prefixed, so that ("ab", "c") and ("a", "bc") differ."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
