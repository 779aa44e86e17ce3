"""PromptHashes: the names of a prompt's blocks as nodes compute them, made when first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.block_hash import BlockHash, BlockHasher, ShortHash, extra_keys_of, shorten


class HashKind(NamedTuple):
    """What makes the same prefix have the same names.

    Attributes:
        block_size: tokens per block.
        algorithm: a name in HASH_ALGORITHMS.
        namespace: of nodes whose KV of equal tokens is equal.
    """

    block_size: int
    algorithm: str
    namespace: bytes = b""


class PromptHashes:
    """Short hashes of one prompt's full blocks.

    Args:
        token_ids: of the prompt.
        cache_salt: of who shares its KV; as on the nodes.
    """

    def __init__(self, token_ids: Sequence[int], cache_salt: bytes = b"") -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._extra_keys = extra_keys_of(cache_salt)
        self._known: dict[HashKind, tuple[ShortHash, ...]] = {}
        self._salted: dict[bytes, PromptHashes] = {}

    def are_of(self, token_ids: Sequence[int], cache_salt: bytes) -> bool:
        """Whether they are of this very prompt with this salt."""
        return token_ids is self._token_ids and cache_salt == self._cache_salt

    def of(self, kind: HashKind) -> tuple[ShortHash, ...]:
        """The names of the prompt's full blocks, the first one first."""
        hashes = self._known.get(kind)
        if hashes is None:
            whole: list[BlockHash] = []
            if len(self._token_ids) >= kind.block_size:  # a node may say any size
                hasher = BlockHasher(*kind)
                hasher.extend(whole, self._token_ids, self._extra_keys)
            hashes = self._known[kind] = shorten(whole)
        return hashes

    def salted(self, cache_salt: bytes) -> PromptHashes:
        """Those of the same prompt with another salt."""
        hashes = self._salted.get(cache_salt)
        if hashes is None:
            hashes = self._salted[cache_salt] = PromptHashes(self._token_ids, cache_salt)
        return hashes
