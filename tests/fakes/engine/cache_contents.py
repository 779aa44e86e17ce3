"""Compares the blocks that a prefix cache gives with the contents that they must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from baton.kv.block_hash import BlockHash, BlockHasher, cache_namespace, extra_keys_of
from engine.engine import Engine


def contents_of(
    compatibility: Mapping[str, str],
    prompts: Iterable[tuple[list[int], torch.Tensor]],
    cache_salt: bytes = b"",
) -> dict[BlockHash, torch.Tensor]:
    """Return the full blocks of prompts by hash, as compatible engines hash them.

    Args:
        prompts: prompts with their KV, block by block.
    """
    hasher = BlockHasher(int(compatibility["block_size"]), namespace=cache_namespace(compatibility))
    contents: dict[BlockHash, torch.Tensor] = {}
    for prompt, kv in prompts:
        hashes: list[BlockHash] = []
        hasher.extend(hashes, prompt, extra_keys_of(cache_salt))
        contents |= zip(hashes, kv, strict=False)
    return contents


def check_cache(engine: Engine, contents: Mapping[BlockHash, torch.Tensor]) -> None:
    """Assert that each cached block with a known content has it."""
    named = [
        (block_id, contents[name])
        for block_id, block in enumerate(engine.block_pool._blocks)
        if (name := block.block_hash) is not None and name in contents
    ]
    if named:
        found = engine.kv_memory.tensor[[block_id for block_id, _ in named]]
        expected = torch.stack([content for _, content in named])
        is_right = torch.isclose(found, expected, rtol=1e-4, atol=1e-4).flatten(1).all(dim=1)
        wrong = [
            block_id for (block_id, _), right in zip(named, is_right, strict=True) if not right
        ]
        assert not wrong, f"blocks {wrong} are not what the prefix cache calls them"
