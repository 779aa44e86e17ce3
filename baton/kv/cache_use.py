"""CacheUse: the size of a node's prefix cache, and how many tokens it served. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Figures of a node's prefix cache and of its files; tokens are counted from the node's start.

    Attributes:
        num_blocks: number of different blocks in the cache.
        num_bytes: bytes of these blocks over all ranks.
        num_pinned_blocks: number of these blocks that pins keep.
        memory_tokens: prompt tokens that requests found in the cache. On a decode node, no prefill
            node had to send or compute these tokens.
        file_tokens: prompt tokens for which requests waited until they were read from files. Tokens
            of a prefetch count as ``memory_tokens`` if a request finds them later.
        fetched_tokens: prompt tokens that other nodes sent from their caches.
        file_bytes, num_files: files or objects of ``--kv-files``, including those of other nodes.
        are_objects: whether these files are objects on a server.
        memory_age_s, file_age_s, fetched_age_s: median seconds from the last use of a block until a
            request used the block again, by the source of the block; 0: no block was used again.
        evicted_after_s: mean seconds between the last use and the eviction of a block; 0: no block
            was evicted.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_pinned_blocks: int = 0
    memory_tokens: int = 0
    file_tokens: int = 0
    fetched_tokens: int = 0
    file_bytes: int = 0
    num_files: int = 0
    are_objects: bool = False
    memory_age_s: float = 0.0
    file_age_s: float = 0.0
    fetched_age_s: float = 0.0
    evicted_after_s: float = 0.0


NO_CACHE = CacheUse()
