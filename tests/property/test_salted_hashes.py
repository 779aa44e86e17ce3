"""Property tests of salted block hashes: router and node agree, tenants share nothing, one tenant
loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.access.identity import Principal
from baton.kv.block_hash import HASH_ALGORITHMS, BlockHash, BlockHasher, extra_keys_of, shorten
from engine.core.request import Request
from router.fleet.prefix.prefix_index import PrefixIndex
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes
from router.intake.cache_salts import CacheSalts
from tests.fakes.engine.engine_parts import make_request
from tests.fakes.system.checked_client import num_equal
from tests.unit.engine.test_prefix_cache import compute, make_manager

SALTS = CacheSalts(b"a secret of the fleet")
BLOCK_SIZE = 4

names = st.text(max_size=6)
principals = st.builds(Principal, name=names, tenant=names, cache_group=st.just("") | names)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
algorithms = pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)


def who_shares(principal: Principal) -> tuple[str, str]:
    """Return who shares a principal's cache: its group, else its tenant, else everybody."""
    if principal.cache_group:
        return "group", principal.cache_group
    return ("tenant", principal.tenant) if principal.tenant else ("", "")


def node_names(token_ids: list[int], salt: bytes, algorithm: str) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    BlockHasher(BLOCK_SIZE, algorithm).extend(hashes, token_ids, extra_keys_of(salt))
    return hashes


@algorithms
@given(one=principals, other=principals, left=prompts, right=prompts)
def test_blocks_have_one_name_for_who_may_share_them_and_never_for_others(
    algorithm: str, one: Principal, other: Principal, left: list[int], right: list[int]
) -> None:
    mine = node_names(left, SALTS.of(one), algorithm)
    theirs = node_names(right, SALTS.of(other), algorithm)
    if who_shares(one) != who_shares(other):
        assert not set(mine) & set(theirs)
        assert not set(shorten(mine)) & set(shorten(theirs))
    else:
        num_shared = num_equal(left, right) // BLOCK_SIZE
        assert mine[:num_shared] == theirs[:num_shared]
        assert not set(mine[num_shared:]) & set(theirs[num_shared:])


@algorithms
@given(principal=principals, token_ids=prompts)
def test_the_router_computes_what_nodes_compute(
    algorithm: str, principal: Principal, token_ids: list[int]
) -> None:
    salt = SALTS.of(principal)
    at_router = PromptHashes(token_ids, salt).of(HashKind(BLOCK_SIZE, algorithm))
    assert at_router == shorten(node_names(token_ids, salt, algorithm))


@given(one=principals, other=principals, token_ids=st.lists(st.integers(0, 2), min_size=9))
def test_a_prefix_cache_gives_a_prompt_to_who_may_share_it_only(
    one: Principal, other: Principal, token_ids: list[int]
) -> None:
    def request(principal: Principal) -> Request:
        keys = extra_keys_of(SALTS.of(principal))
        return make_request("a", prompt=token_ids, extra_keys=keys)

    manager = make_manager(num_blocks=2 * len(token_ids))
    compute(manager, request(one))
    full = (len(token_ids) - 1) // manager.block_size * manager.block_size
    shared = who_shares(one) == who_shares(other)
    assert manager.allocate_with_prefix(request(other)) == (full if shared else 0)


@given(one=principals, other=principals, token_ids=st.lists(st.integers(0, 2), min_size=4))
def test_the_router_places_nobody_by_what_others_sent(
    one: Principal, other: Principal, token_ids: list[int]
) -> None:
    """Check blocks that nodes report, and recent placements."""
    index = PrefixIndex()
    index.add_node("node", HashKind(BLOCK_SIZE, "blake2b"))
    index.note_placement("node", PromptHashes(token_ids, SALTS.of(one)))
    found = index.match_tokens(PromptHashes(token_ids, SALTS.of(other)))
    shared = who_shares(one) == who_shares(other)
    assert found == ({"node": len(token_ids) // BLOCK_SIZE * BLOCK_SIZE} if shared else {})
