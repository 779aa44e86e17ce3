"""Unit tests of the limits on work and memory for pins of long prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.kv.block_hash import BlockHash, BlockHasher
from baton.kv.pins import PinTerms, PrefixPin
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.pins.prefix_pins import COUNT_S, HASHES_PER_BLOCK, TICK_S, PrefixPins
from tests.fakes.engine.engine_parts import make_request

BLOCK_SIZE = 2
TERMS = PinTerms(b"tenant", b"session", (PrefixPin(10.0),))


def make_manager(*windows: int | None) -> KVCacheManager:
    return KVCacheManager(64, BLOCK_SIZE, sliding_windows=windows, hasher=BlockHasher(BLOCK_SIZE))


@pytest.mark.parametrize("windows", [(16,), (None,), (None, 16), (16, 6)])
def test_a_long_pin_is_cut_to_the_longest_prefix_that_fits(windows: tuple[int | None, ...]) -> None:
    manager = make_manager(*windows)
    coordinator, calls = manager.coordinator, list[int]()
    names_needed = coordinator.names_needed

    def counted(hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        calls.append(len(hashes))
        return names_needed(hashes)

    coordinator.names_needed = counted  # type: ignore[method-assign]
    pins = PrefixPins(manager, 7, 100.0)
    request = make_request("a", prompt=[1] * 200 * BLOCK_SIZE)
    pins.begin(request, PinTerms(prefixes=(PrefixPin(10.0),)))
    num_blocks = request.num_pinned_tokens // BLOCK_SIZE
    assert 0 < num_blocks < 200
    assert len(names_needed(request.block_hashes[:num_blocks])) <= 7
    assert len(names_needed(request.block_hashes[: num_blocks + 1])) > 7
    # Each call lists all blocks of a prefix; with full attention, these are the prefix itself.
    assert len(calls) == (windows != (None,))
    pins.check()


def test_pins_of_many_prefixes_of_one_prompt_store_a_bounded_number_of_hashes() -> None:
    num_blocks = 3 * HASHES_PER_BLOCK
    pins = PrefixPins(make_manager(None), num_blocks, 100.0)
    request = make_request("a", prompt=[1] * num_blocks * BLOCK_SIZE)
    for length in range(num_blocks, 0, -1):  # a longer prefix would replace the shorter ones
        prefix = PrefixPin(10.0, length * BLOCK_SIZE)
        pins.begin(request, PinTerms(prefixes=(prefix,)))
    [own] = pins._owners.values()
    assert 1 < sum(len(pin.hashes) for pin in own.pins.values()) <= HASHES_PER_BLOCK * num_blocks
    assert pins.counts.displaced > 0
    pins.check()


def test_pins_that_begin_and_end_are_no_uses_of_their_blocks() -> None:
    manager = make_manager(None)
    pool, pins = manager.block_pool, PrefixPins(manager, 8, 100.0)
    requests = [make_request(name, prompt=[1] * 8) for name in "ab"]
    assert manager.allocate_with_prefix(requests[0]) is not None
    requests[0].num_computed_tokens = 8
    manager.cache_blocks(requests[0])
    manager.free(requests[0])
    least_free = pool.least_free
    pins.begin(requests[1], TERMS)
    assert pins.drop_session(TERMS.owner, TERMS.session) == 1
    assert sum(pool.residency.reuse_gap.counts) == 0
    assert (pool.num_free, pool.least_free) == (64, least_free)
    pool.check()


def test_the_pool_asks_about_freed_blocks_only_while_there_are_pins() -> None:
    manager = make_manager(None)
    pool, pins = manager.block_pool, PrefixPins(manager, 8, 100.0)
    assert pool.keeps is None
    pins.begin(make_request("a", prompt=[1] * 8), TERMS)
    assert pool.keeps is not None
    pins.clear()
    assert pool.keeps is None


def test_kept_blocks_are_counted_at_times_and_pins_always() -> None:
    manager, now = make_manager(None), [0.0]
    pool, pins = manager.block_pool, PrefixPins(manager, 8, 100.0, clock=lambda: now[0])
    counts = []
    for number in range(2):
        request = make_request(f"r{number}", prompt=[number] * 8)
        assert manager.allocate_with_prefix(request) is not None
        request.num_computed_tokens = 8
        manager.cache_blocks(request)
        pins.begin(request, PinTerms(b"tenant", b"session", (PrefixPin(100.0),)))
        now[0] += TICK_S
        pins.tick()
        counts.append((pins.counts.open, pins.counts.blocks))
    now[0] += COUNT_S
    pins.tick()
    counts.append((pins.counts.open, pins.counts.blocks))
    assert counts == [(1, 4), (2, 4), (2, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "find", lambda *given: pytest.fail("looked"))
        now[0] += TICK_S
        pins.tick()
    pins.clear()
    assert (pins.counts.open, pins.counts.blocks) == (0, 0)


def test_dropping_an_unknown_session_looks_at_no_block_and_no_pin() -> None:
    manager = make_manager(None)
    pins = PrefixPins(manager, 8, 100.0)
    pins.begin(make_request("a", prompt=[1] * 8), TERMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager.block_pool, "find", lambda *given: pytest.fail("looked"))
        patch.setattr(pins, "_end_pins", lambda *given: pytest.fail("looked"))
        assert pins.drop_session(TERMS.owner, b"other") == 0


def test_a_drop_ends_no_pin_of_another_session() -> None:
    pins = PrefixPins(make_manager(None), 8, 100.0)
    one, other = (
        PinTerms(b"tenant", session, (PrefixPin(10.0),)) for session in (b"one", b"other")
    )
    pins.begin(make_request("a", prompt=[1] * 8), one)
    pins.begin(make_request("b", prompt=[1] * 12), other)  # begins like the first prompt
    assert len(pins._kept) == 6
    assert pins.drop_session(b"tenant", b"other") == 1
    assert len(pins._kept) == 4
    pins.begin(make_request("c", prompt=[1] * 8), other)  # the first prompt again
    assert pins.drop_session(b"tenant", b"other") == pins.drop_session(b"tenant", b"one") == 0
    assert len(pins._kept) == 4
    pins.check()


def test_a_pin_of_the_same_prefix_looks_at_no_block() -> None:
    pins = PrefixPins(make_manager(None), 8, 100.0)
    for name in "ab":
        pins.begin(make_request(name, prompt=[1] * 8), TERMS)
        pins._change = lambda *given: pytest.fail("looked")  # type: ignore[method-assign]
    assert (pins.counts.made, len(pins._kept)) == (1, 4)
