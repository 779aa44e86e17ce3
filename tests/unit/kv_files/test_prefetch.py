"""Unit tests of hints that name a session: which blocks are read ahead, and how many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.kv.pins import PinTerms
from engine.core.pins.sessions import LEAST_AHEAD_S, PrefetchBudget, SessionPrefixes
from engine.engine import Engine
from tests.fakes.time.waiting import wait_until
from tests.unit.kv_files.test_file_tier import (
    NUM_OUT,
    PROMPT,
    Clock,
    answer,
    ask,
    load,
    run,
    tier_of,
    trouble,
)

TERMS = PinTerms(b"owner", b"session")
NUM_BLOCKS = (len(PROMPT) + NUM_OUT - 1) // 16


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine that has answered a session's request, and whose cache was then emptied."""
    engine = load(tmp_path, pin_share=0.5)
    request = ask(engine)
    engine.features.pins.begin(request, TERMS)
    run(engine)
    wait_until(lambda: tier_of(engine).counts().runs["written"] == 1, "the answer is written")
    engine.block_pool.reset_prefix_cache()
    yield engine
    engine.features.pins.check()
    engine.block_pool.check()
    assert sum(engine.block_pool.ref_counts().values()) == 0
    engine.close()


def hint(engine: Engine, terms: PinTerms = TERMS, keep_s: float = 60.0) -> int:
    """Give a hint; return how many blocks are cached when the hint's read has ended."""
    engine.features.hint_session(terms.owner, terms.session, keep_s)
    reads = tier_of(engine)._reads
    wait_until(lambda: all(read.has_ended for read in reads), "the read ends")
    engine.features.settle_files()
    return engine.block_pool.num_cached


def test_a_named_session_is_read_ahead_and_pinned(engine: Engine) -> None:
    assert hint(engine, PinTerms(b"other", b"session")) == 0
    assert hint(engine, PinTerms(b"owner", b"other")) == 0
    assert engine.features.pins.counts.made == 0
    assert hint(engine) == NUM_BLOCKS
    counts = tier_of(engine).counts()
    assert (counts.hits, counts.tokens_read) == (0, NUM_BLOCKS * 16)
    assert engine.features.pins.counts.made == 1
    assert len(engine.features.pins._kept) == NUM_BLOCKS
    assert hint(engine) == NUM_BLOCKS, "nothing is lacking"
    said = answer(engine)
    assert said[1] == 8 * 16
    engine.block_pool.reset_prefix_cache()
    assert answer(engine)[0] == said[0]


def test_a_dropped_session_is_unknown(engine: Engine) -> None:
    assert hint(engine) == NUM_BLOCKS
    hint(engine, keep_s=0.0)
    assert engine.features.pins.counts.dropped == 1
    engine.block_pool.reset_prefix_cache()
    assert hint(engine) == 0


def test_prefetches_take_no_more_than_the_owner_s_share(engine: Engine) -> None:
    assert hint(engine) == NUM_BLOCKS
    engine.block_pool.reset_prefix_cache()
    assert hint(engine) == 16 - NUM_BLOCKS, "half of 32 blocks is the share"
    engine.block_pool.reset_prefix_cache()
    assert hint(engine) == 0


def test_a_prefetch_takes_only_free_blocks_that_are_not_pinned(engine: Engine) -> None:
    pool, pins = engine.block_pool, engine.features.pins
    taken = pool.allocate(26) or []  # requests use these blocks
    assert hint(engine) == 4, "of 6 free blocks, a read takes at most 4"
    pool.check()
    pool.release(taken)
    assert len(pins._kept) == NUM_BLOCKS
    assert pins.room_for_prefetch(TERMS.owner) == 16 - 4
    taken = pool.allocate(24) or []
    assert pins.room_for_prefetch(TERMS.owner) == 8 - 4
    pool.release(taken)


def test_a_prompt_joins_the_read_of_its_session(engine: Engine) -> None:
    files = trouble(engine)
    files.gate.clear()
    engine.features.hint_session(TERMS.owner, TERMS.session, 60.0)
    assert files.stands.wait(60)
    request = ask(engine)
    assert request.awaits_prefix
    assert len(tier_of(engine)._reads) == 1
    files.gate.set()
    run(engine)
    assert request.num_hit_tokens == 8 * 16
    assert tier_of(engine).counts().hits == 1


def test_tokens_of_a_prefetch_count_as_memory_once_a_prompt_uses_them(engine: Engine) -> None:
    before = engine.figures.cache_use(0)
    assert hint(engine) == NUM_BLOCKS
    assert engine.figures.cache_use(0).file_tokens == 0
    answer(engine)
    found = engine.figures.cache_use(0)
    assert (found.file_tokens, found.memory_tokens - before.memory_tokens) == (0, 8 * 16)


def test_reading_ahead_gives_way_to_a_prompt_of_another_session(engine: Engine) -> None:
    other = [9, *PROMPT]
    ask(engine, prompt=other)
    run(engine)
    wait_until(lambda: tier_of(engine).counts().runs["written"] == 2, "both are written")
    engine.block_pool.reset_prefix_cache()
    files = trouble(engine)
    files.gate.clear()
    engine.features.hint_session(TERMS.owner, TERMS.session, 60.0)
    assert files.stands.wait(60)
    request = ask(engine, prompt=other)
    ahead, own = tier_of(engine)._reads
    assert [job.is_stopped for read in (ahead, own) for _, job in read.jobs] == [True, False]
    files.gate.set()
    run(engine)
    assert request.num_hit_tokens == 6 * 16, "reads hold at most half of all blocks"


def test_reading_ahead_goes_on_if_a_prompt_finds_no_room_for_its_read(engine: Engine) -> None:
    other = [9, *PROMPT]
    ask(engine, prompt=other)
    run(engine)
    wait_until(lambda: tier_of(engine).counts().runs["written"] == 2, "both are written")
    engine.block_pool.reset_prefix_cache()
    files = trouble(engine)
    files.gate.clear()
    engine.features.hint_session(TERMS.owner, TERMS.session, 60.0)
    assert files.stands.wait(60)
    taken = engine.block_pool.allocate(16) or []  # half of all blocks
    engine.features.side_blocks.add_holder(lambda: taken)
    request = ask(engine, prompt=other)
    (ahead,) = tier_of(engine)._reads
    assert not request.awaits_prefix
    assert not any(job.is_stopped for _, job in ahead.jobs)
    files.gate.set()
    wait_until(lambda: ahead.has_ended, "the read ends")
    run(engine)
    engine.block_pool.release(taken)


def test_cached_blocks_before_a_read_count_as_withheld(engine: Engine) -> None:
    ask(engine, prompt=PROMPT[: 2 * 16 + 1])
    run(engine)
    files = trouble(engine)
    files.gate.clear()
    ask(engine)
    assert files.stands.wait(60)
    (read,) = tier_of(engine)._reads
    assert (len(read.held_ids), len(read.block_ids)) == (2, 6)
    assert engine.features.side_blocks.num_held == 8
    files.gate.set()
    run(engine)
    assert engine.features.side_blocks.num_held == 0


def test_sessions_are_forgotten_by_owners_with_many() -> None:
    sessions = SessionPrefixes(1)  # 16 hashes
    sessions.remember(b"few", b"s", (b"h",) * 4)
    for number in range(5):
        sessions.remember(b"many", b"%d" % number, (b"h",) * 4)
    known = [bool(sessions.find(b"many", b"%d" % number)) for number in range(5)]
    assert known == [False, False, True, True, True]
    assert sessions.find(b"few", b"s")
    sessions.remember(b"few", b"s", ())
    assert not sessions.find(b"few", b"s")


def test_a_prefetch_counts_for_some_time_even_if_it_is_short() -> None:
    clock = Clock()
    budget = PrefetchBudget(clock)
    budget.count_prefetch(b"a", 5, 0.001)
    assert (budget.num_left(b"a", 8), budget.num_left(b"b", 8)) == (3, 8)
    clock.now = LEAST_AHEAD_S
    assert budget.num_left(b"a", 8) == 8


def test_owners_that_do_not_prefetch_again_are_forgotten() -> None:
    """Regression: each owner that ever prefetched was kept for the life of the node."""
    clock = Clock()
    budget = PrefetchBudget(clock)
    for number in range(1000):
        clock.now = float(number)
        budget.count_prefetch(b"%d" % number, 1, keep_s=20.0)
        assert len(budget._taken) <= 2 * 20
    assert budget.num_left(b"999", 8) == budget.num_left(b"985", 8) == 7
