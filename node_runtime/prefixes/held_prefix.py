"""Finds the cached prefix of a prompt that another node asks for. Refuses to know: transfers."""

from __future__ import annotations

from collections.abc import Sequence

from baton.api.images import ImageSpan
from baton.kv.block_hash import BlockHash
from engine.core.kv_cache_manager import KVCacheManager


def find_prefix(
    manager: KVCacheManager,
    token_ids: Sequence[int],
    extra_keys: Sequence[bytes],
    images: Sequence[ImageSpan],
) -> tuple[list[int], BlockHash]:
    """Find the longest cached prefix of a prompt, without taking references.

    Args:
        manager: owner of the prefix cache.
        extra_keys: values from `extra_keys_of`.
        images: the prompt's images, in order.

    Returns:
        The blocks, and the hash of the last one; no blocks and an empty hash without a prefix.
    """
    hashes: list[BlockHash] = []
    if manager.hasher is not None:
        manager.hasher.extend(hashes, token_ids, extra_keys, images)
    block_ids = manager.coordinator.longest_hit(hashes)
    num_blocks = len(block_ids) // manager.num_groups
    return block_ids, hashes[num_blocks - 1] if num_blocks else b""
