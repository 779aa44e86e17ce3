"""CacheUse: what a node's prefix cache holds, and from where it served prompts. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """A node's prefix cache and its files. Tokens count from the node's start.

    Attributes:
        num_blocks: different contents in the cache.
        num_bytes: bytes of these blocks, on all ranks.
        num_pinned_blocks: blocks among them that pins keep.
        memory_tokens: prompt tokens that requests found in the cache. On a decode node, these are
            the tokens that no prefill node had to send or compute.
        file_tokens: tokens that came from files.
        fetched_tokens: tokens that came from other nodes' caches.
        file_bytes, num_files: files in the folder, those of other nodes included.
        evicted_after_s: mean seconds since the last use of the blocks that were evicted; 0: none
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
    evicted_after_s: float = 0.0


NO_CACHE = CacheUse()
