"""Unit tests of the prefix cache: hits, computed tokens, and the order of eviction."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.kv.block_hash import BlockHash, BlockHasher
from engine.core.block_pool import (
    BlockPool,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVCacheEvent,
)
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from tests.fakes.engine.engine_parts import ContentRunner, make_request, make_scheduler, step

BLOCK_SIZE = 4
PROMPT = list(range(10, 30))  # five blocks


def make_manager(num_blocks: int = 20) -> KVCacheManager:
    return KVCacheManager(
        num_blocks, BLOCK_SIZE, hasher=BlockHasher(BLOCK_SIZE), record_events=True
    )


def hashes_of(token_ids: Sequence[int], extra_keys: tuple[bytes, ...] = ()) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    BlockHasher(BLOCK_SIZE).extend(hashes, token_ids, extra_keys)
    return hashes


def compute(manager: KVCacheManager, request: Request) -> None:
    """Compute all known tokens of a request, as a scheduler does."""
    assert manager.allocate_with_prefix(request) is not None
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request)


def replay(events: list[KVCacheEvent], known: set[BlockHash]) -> None:
    """Apply events as a router does; each must fit the ones before."""
    for event in events:
        if isinstance(event, BlocksStored):
            assert known.isdisjoint(event.hashes)
            known.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            assert known.issuperset(event.hashes)
            known.difference_update(event.hashes)
        else:
            assert isinstance(event, BlocksCleared)
            known.clear()


def found_hashes(pool: BlockPool, candidates: Sequence[BlockHash]) -> set[BlockHash]:
    return {block_hash for block_hash in candidates if pool.find(block_hash) is not None}


def run_one(scheduler: Scheduler, runner: ContentRunner, request: Request) -> tuple[int, Request]:
    """Run a request to its end; the tokens that were computed for it."""
    scheduler.add_request(request)
    num_computed = 0
    while scheduler.has_work:
        num_computed += step(scheduler, runner)[0].get(request.request_id, 0)
    return num_computed, request


# ---------------------------------------------------------------- hits


@pytest.mark.parametrize("num_shared", range(21))
@pytest.mark.parametrize("num_tokens", [20, 21, 24])
def test_a_hit_is_the_full_blocks_that_are_shared_without_the_last_token(
    num_shared: int, num_tokens: int
) -> None:
    manager = make_manager()
    first = make_request("first", prompt=PROMPT)
    compute(manager, first)
    prompt = PROMPT[:num_shared] + [7] * (num_tokens - num_shared)
    second = make_request("second", prompt=prompt)
    num_cached = manager.allocate_with_prefix(second)
    expected_blocks = min(num_shared, num_tokens - 1) // BLOCK_SIZE
    assert num_cached == expected_blocks * BLOCK_SIZE
    assert second.block_ids[:expected_blocks] == first.block_ids[:expected_blocks]
    assert not set(second.block_ids[expected_blocks:]) & set(first.block_ids)
    assert len(second.block_ids) == manager.num_blocks_for(num_tokens)
    assert second.num_cached_blocks == expected_blocks
    manager.block_pool.check()


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_the_same_prompt_again_computes_its_last_token_and_no_full_block_before(
    num_tokens: int,
) -> None:
    scheduler, runner = make_scheduler(prefix_cache=True), ContentRunner(BLOCK_SIZE)
    run_one(scheduler, runner, make_request("a", prompt=PROMPT[:num_tokens], max_tokens=1))
    again = make_request("b", prompt=PROMPT[:num_tokens], max_tokens=1)
    num_computed, _ = run_one(scheduler, runner, again)
    assert num_computed == (num_tokens - 1) % BLOCK_SIZE + 1
    assert again.num_hit_tokens == num_tokens - num_computed
    assert again.num_prompt_tokens_computed == num_computed


def test_with_the_prefix_cache_off_nothing_is_found_named_or_told() -> None:
    scheduler, runner = make_scheduler(prefix_cache=False), ContentRunner(BLOCK_SIZE)
    run_one(scheduler, runner, make_request("a", prompt=PROMPT, max_tokens=1))
    num_computed, again = run_one(scheduler, runner, make_request("b", prompt=PROMPT, max_tokens=1))
    assert (num_computed, again.num_hit_tokens, again.block_hashes) == (20, 0, [])
    assert scheduler.kv_cache_manager.block_pool.take_events() == []


def test_a_block_in_the_middle_of_a_prompt_is_not_found_without_those_before_it() -> None:
    manager = make_manager()
    compute(manager, make_request("first", prompt=PROMPT))
    shifted = make_request("second", prompt=PROMPT[4:])
    assert manager.allocate_with_prefix(shifted) == 0


def test_only_computed_full_blocks_are_named_and_each_step_names_the_new_ones() -> None:
    manager = make_manager()
    request = make_request("a", prompt=PROMPT)
    manager.allocate_with_prefix(request)
    hashes = hashes_of(PROMPT)
    for num_computed, num_named in ((3, 0), (4, 1), (7, 1), (15, 3), (15, 3), (20, 5)):
        request.num_computed_tokens = num_computed
        manager.cache_blocks(request)
        assert found_hashes(manager.block_pool, hashes) == set(hashes[:num_named])
    assert manager.block_pool.take_events() == [
        BlocksStored((hashes[0],), None),
        BlocksStored((hashes[1], hashes[2]), hashes[0]),
        BlocksStored((hashes[3], hashes[4]), hashes[2]),
    ]


def test_requests_that_run_together_share_what_is_computed_already_and_nothing_else() -> None:
    scheduler = make_scheduler(prefix_cache=True, long_prefill_token_threshold=8)
    runner = ContentRunner(BLOCK_SIZE)
    first, second, third = (make_request(name, prompt=PROMPT, max_tokens=9) for name in "abc")
    scheduler.add_request(first)
    scheduler.add_request(second)  # the same step: nothing is computed yet, both compute
    assert step(scheduler, runner)[0] == {"a": 8, "b": 8}
    assert not set(first.block_ids) & set(second.block_ids)
    scheduler.add_request(third)
    assert step(scheduler, runner)[0] == {"a": 8, "b": 8, "c": 8}
    assert third.num_hit_tokens == 8
    assert third.block_ids[:2] in (first.block_ids[:2], second.block_ids[:2])
    scheduler.abort("a")
    scheduler.abort("b")
    while scheduler.has_work:  # what it shares stays while it runs
        step(scheduler, runner)
    assert third.num_output_tokens == 9


def test_the_next_turn_of_a_talk_finds_prompt_and_answer_of_the_turn_before() -> None:
    scheduler, runner = make_scheduler(prefix_cache=True), ContentRunner(BLOCK_SIZE)
    _, turn = run_one(scheduler, runner, make_request("1", prompt=PROMPT[:6], max_tokens=7))
    assert turn.num_tokens == 13  # of which the last was never computed
    prompt = [*turn.token_ids, 50, 51, 52]
    num_computed, again = run_one(scheduler, runner, make_request("2", prompt=prompt, max_tokens=1))
    assert again.num_hit_tokens == 12
    assert num_computed == 4


def test_remote_kv_is_found_by_later_requests() -> None:
    scheduler, runner = make_scheduler(prefix_cache=True), ContentRunner(BLOCK_SIZE)
    remote = make_request("remote", prompt=PROMPT, max_tokens=2)
    scheduler.park(remote)
    scheduler.grant("remote")
    assert scheduler.kv_cache_manager.block_pool.num_cached == 0  # nothing has arrived
    runner.write(remote, 0, 20)
    scheduler.commit("remote", 5)
    num_computed, local = run_one(
        scheduler, runner, make_request("local", prompt=[*PROMPT, 5, 5], max_tokens=1)
    )
    assert (local.num_hit_tokens, num_computed) == (20, 2)


def test_extra_keys_keep_users_apart_who_send_the_same_prompt() -> None:
    manager = make_manager()
    compute(manager, make_request("a", prompt=PROMPT, extra_keys=(b"salt-1",)))
    for extra_keys, num_cached in (
        ((), 0),
        ((b"salt-2",), 0),
        ((b"salt-1", b"lora"), 0),
        ((b"salt-1",), 16),
    ):
        request = make_request("b", prompt=PROMPT, extra_keys=extra_keys)
        assert manager.allocate_with_prefix(request) == num_cached
        manager.free(request)


# ---------------------------------------------------------------- memory


def test_what_a_finished_request_leaves_is_evicted_from_its_tail_on() -> None:
    manager = make_manager(num_blocks=5)
    request = make_request("a", prompt=PROMPT)
    compute(manager, request)
    manager.free(request)
    pool, hashes = manager.block_pool, hashes_of(PROMPT)
    assert pool.num_free == 5
    for num_left in (4, 3, 2, 1, 0):
        assert len(found_hashes(pool, hashes)) == num_left + 1  # freeing evicted nothing
        pool.allocate(1)
        assert found_hashes(pool, hashes) == set(hashes[:num_left])
        assert pool.num_cached == num_left


def test_the_request_that_ended_first_is_forgotten_first_and_a_hit_makes_it_the_newest() -> None:
    manager = make_manager(num_blocks=4)
    old, new = PROMPT[:8], PROMPT[8:16]
    for name, prompt in (("old", old), ("new", new)):
        request = make_request(name, prompt=prompt)
        compute(manager, request)
        manager.free(request)
    again = make_request("again", prompt=[*old, 1])
    manager.block_pool.touch(manager.find_cached_blocks(again))
    manager.block_pool.release(reversed(manager.find_cached_blocks(again)))
    manager.block_pool.allocate(2)
    found = found_hashes(manager.block_pool, hashes_of(old) + hashes_of(new))
    assert found == set(hashes_of(old))


@pytest.mark.parametrize("num_spare", [0, 1, 2])
def test_a_request_that_does_not_fit_beside_its_own_prefix_changes_nothing(num_spare: int) -> None:
    """A free cached block is no longer free once it is taken: it must not be counted twice."""
    manager = make_manager(num_blocks=6 + num_spare)
    first = make_request("first", prompt=PROMPT[:12])
    compute(manager, first)
    manager.free(first)  # 3 blocks are free and cached, 3 and the spare ones just free
    pool = manager.block_pool
    pool.take_events()
    before = (pool.num_free, pool.num_cached, pool.ref_counts())
    second = make_request("second", prompt=PROMPT[:12] + [7] * 13)  # 3 + 4 blocks
    assert manager.allocate_with_prefix(second, num_spare) is None
    assert (pool.num_free, pool.num_cached, pool.ref_counts()) == before
    assert pool.take_events() == []
    assert (second.block_ids, second.num_cached_blocks) == ([], 0)
    third = make_request("third", prompt=PROMPT[:12] + [7] * 12)  # 3 + 3 blocks: just fits
    assert manager.allocate_with_prefix(third, num_spare) == 12
    assert pool.num_free == num_spare
    pool.check()


def test_a_reserve_keeps_blocks_free_for_those_that_run_and_a_lone_one_may_take_all() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_batched_tokens=1000)
    scheduler.add_request(make_request("lone", 796, 10, max_model_len=800))
    assert "lone" in step(scheduler)[0]  # 199 of 200 blocks
    scheduler.add_request(make_request("late", 1, 1))
    assert "late" not in step(scheduler)[0]  # it would leave no block, one percent is 2
    scheduler.abort("lone")
    scheduler.add_request(make_request("next", 4 * 197, 10))
    assert set(step(scheduler)[0]) == {"late", "next"}  # it leaves exactly 2


def test_a_preempted_request_resumes_from_its_own_prefix() -> None:
    scheduler = make_scheduler(num_blocks=6, prefix_cache=True)
    runner = ContentRunner(BLOCK_SIZE)
    old = make_request("old", prompt=[1] * 8, max_tokens=12)
    new = make_request("new", prompt=PROMPT[:11], max_tokens=8)
    scheduler.add_request(old)
    scheduler.add_request(new)
    while new.status is not RequestStatus.PREEMPTED:
        step(scheduler, runner)
    assert (new.block_ids, new.num_computed_tokens, new.num_cached_blocks) == ([], 0, 0)
    scheduler.abort("old")
    num_tokens = new.num_tokens
    computed, _ = step(scheduler, runner)
    # The step that preempted it took one block, the last of its tail: all full ones are found.
    assert num_tokens - computed["new"] >= 8
    while scheduler.has_work:
        step(scheduler, runner)
    assert new.num_output_tokens == 8


# ---------------------------------------------------------------- reset and events


def test_a_reset_forgets_what_was_computed_and_disturbs_no_request() -> None:
    scheduler, runner = make_scheduler(prefix_cache=True), ContentRunner(BLOCK_SIZE)
    pool = scheduler.kv_cache_manager.block_pool
    running = make_request("running", prompt=PROMPT[:9], max_tokens=9)
    scheduler.add_request(running)
    step(scheduler, runner)
    pool.reset_prefix_cache()
    scheduler.check()
    _, other = run_one(scheduler, runner, make_request("other", prompt=PROMPT[:9], max_tokens=1))
    assert other.num_hit_tokens == 0
    assert running.num_output_tokens == 9
    assert pool.num_free == pool.num_blocks


def test_events_replay_to_exactly_what_is_cached_through_evictions_and_resets() -> None:
    scheduler = make_scheduler(num_blocks=7, prefix_cache=True)
    pool, runner = scheduler.kv_cache_manager.block_pool, ContentRunner(BLOCK_SIZE)
    known: set[BlockHash] = set()
    every_hash: list[BlockHash] = []
    num_removed = 0
    for number in range(12):
        prompt = PROMPT[: 4 * (number % 3)] + [40 + number] * 9
        _, request = run_one(
            scheduler, runner, make_request(str(number), prompt=prompt, max_tokens=5)
        )
        every_hash += hashes_of(request.token_ids)
        if number == 8:
            pool.reset_prefix_cache()
        events = pool.take_events()
        num_removed += sum(isinstance(event, BlocksRemoved) for event in events)
        replay(events, known)
        assert known == found_hashes(pool, every_hash)
        assert pool.num_cached == len(known)
    assert num_removed > 0
    assert known
