"""PromptHashes: computes the hashes of a prompt's blocks, as nodes compute them, when needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.api.images import ImageSpan
from baton.kv.block_hash import BlockHash, BlockHasher, ShortHash, extra_keys_of, shorten


class HashKind(NamedTuple):
    """The parameters of block hashes; with equal parameters, equal prefixes have equal hashes.

    Attributes:
        block_size: number of tokens per block.
        algorithm: a name in HASH_ALGORITHMS.
        namespace: text that is equal on two nodes if they compute equal KV for equal tokens.
    """

    block_size: int
    algorithm: str
    namespace: bytes = b""


class PromptHashes:
    """The short hashes of one prompt's full blocks, computed once per kind of hashes.

    Args:
        token_ids: the prompt's token ids.
        cache_salt: prompts share cached blocks only if their salts are equal, as on the nodes.
        adapter: digest of the adapter that computes the prompt; empty: the base model.
        images: the prompt's images, in order.
        beginning: hashes of an earlier prompt that is the beginning of this prompt, with equal
            salt, adapter and images; these hashes are reused. None: there is none.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        cache_salt: bytes = b"",
        adapter: str = "",
        images: Sequence[ImageSpan] = (),
        beginning: PromptHashes | None = None,
    ) -> None:
        self._token_ids = token_ids
        self._images = images
        self._cache_salt, self._adapter = cache_salt, adapter
        self._extra_keys = extra_keys_of(cache_salt, adapter)
        self._beginning = beginning
        self._known: dict[HashKind, tuple[ShortHash, ...]] = {}
        # Hashes in full length, kept for later prompts that begin with this prompt.
        self._whole: dict[HashKind, list[BlockHash]] = {}
        self._salted: dict[bytes, PromptHashes] = {}

    def are_of(self, token_ids: Sequence[int], cache_salt: bytes, adapter: str) -> bool:
        """Return whether the hashes belong to this very list object, with this salt and adapter."""
        keys = (self._cache_salt, self._adapter)
        return token_ids is self._token_ids and (cache_salt, adapter) == keys

    def of(self, kind: HashKind) -> tuple[ShortHash, ...]:
        """Return the hashes of the prompt's full blocks, in order."""
        hashes = self._known.get(kind)
        if hashes is None:
            whole = [] if self._beginning is None else self._beginning.whole(kind).copy()
            self._extend(whole, kind)
            hashes = self._known[kind] = shorten(whole)
        return hashes

    def whole(self, kind: HashKind) -> list[BlockHash]:
        """Return the hashes of the full blocks in full length; keep them for later prompts."""
        whole = self._whole.get(kind)
        if whole is None:
            whole = self._whole[kind] = []
            self._extend(whole, kind)
        return whole

    def _extend(self, whole: list[BlockHash], kind: HashKind) -> None:
        if len(self._token_ids) >= kind.block_size:  # a node may report any block size
            hasher = BlockHasher(*kind)
            hasher.extend(whole, self._token_ids, self._extra_keys, self._images)

    def salted(self, cache_salt: bytes) -> PromptHashes:
        """Return the hashes of the same prompt with another cache salt."""
        hashes = self._salted.get(cache_salt)
        if hashes is None:
            hashes = PromptHashes(self._token_ids, cache_salt, self._adapter, self._images)
            self._salted[cache_salt] = hashes
        return hashes
