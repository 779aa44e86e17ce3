"""Unit tests of PromptHashes: the nodes' hashes, computed once."""

from __future__ import annotations

import pytest

from baton.kv.block_hash import HASH_ALGORITHMS, BlockHash, BlockHasher, extra_keys_of, shorten
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes

TOKENS = list(range(100, 130))


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
@pytest.mark.parametrize("block_size", [1, 8, 30, 31])
def test_names_are_those_that_a_node_computes(block_size: int, algorithm: str) -> None:
    on_node: list[BlockHash] = []
    hasher = BlockHasher(block_size, algorithm, b"namespace")
    hasher.extend(on_node, TOKENS, extra_keys_of(b"salt"))
    hashes = PromptHashes(TOKENS, b"salt").of(HashKind(block_size, algorithm, b"namespace"))
    assert hashes == shorten(on_node)
    assert len(hashes) == 30 // block_size


def test_kinds_have_different_names_and_each_is_computed_once() -> None:
    prompt = PromptHashes(TOKENS)
    kinds = [HashKind(8, "xxh3_128"), HashKind(8, "sha256"), HashKind(4, "xxh3_128")]
    kinds.append(HashKind(8, "xxh3_128", b"another model"))
    found = [prompt.of(kind) for kind in kinds]
    assert len({block_hash for hashes in found for block_hash in hashes}) == 3 + 3 + 7 + 3
    assert all(prompt.of(kind) is hashes for kind, hashes in zip(kinds, found, strict=True))


def test_a_block_size_that_no_prompt_fills_is_harmless() -> None:
    assert PromptHashes(TOKENS).of(HashKind(2**62, "xxh3_128")) == ()
