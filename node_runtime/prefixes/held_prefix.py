"""Finds the cached prefix of a prompt that another node asks for. Refuses to know: transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.images import ImageSpan
from baton.kv.block_hash import BlockHash
from engine.core.kv_cache_manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """A cached prefix, as a hand-off of its tokens would transfer it.

    Attributes:
        num_tokens: tokens of the prefix; 0: nothing is cached.
        block_ids: the blocks to transfer, interleaved over KV groups; blocks that slid out of a
            window are left out.
        groups: KV group of each of these blocks; empty: there is only one group.
        last_hash: hash of the last logical block; empty: nothing is cached.
    """

    num_tokens: int
    block_ids: tuple[int, ...]
    groups: tuple[int, ...]
    last_hash: BlockHash


NOTHING_HELD = HeldPrefix(0, (), (), b"")


def find_prefix(
    manager: KVCacheManager,
    token_ids: Sequence[int],
    extra_keys: Sequence[bytes],
    images: Sequence[ImageSpan],
) -> HeldPrefix:
    """Find the longest cached prefix of a prompt, without taking references.

    Args:
        manager: owner of the prefix cache.
        extra_keys: values from `extra_keys_of`.
        images: the prompt's images, in order.
    """
    hashes: list[BlockHash] = []
    if manager.hasher is not None:
        manager.hasher.extend(hashes, token_ids, extra_keys, images)
    hit = manager.coordinator.longest_hit(hashes)
    num_blocks = len(hit) // manager.num_groups
    num_tokens = num_blocks * manager.block_size
    places = manager.handoff_places(num_tokens)
    return HeldPrefix(
        num_tokens,
        tuple(hit[place] for place in places),
        groups_of(manager, places),
        hashes[num_blocks - 1] if num_blocks else b"",
    )


def groups_of(manager: KVCacheManager, places: Sequence[int]) -> tuple[int, ...]:
    """Return the KV group of each place in a flat list of blocks; empty if there is one group."""
    if manager.num_groups == 1:
        return ()
    return tuple(place % manager.num_groups for place in places)
