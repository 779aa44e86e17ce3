"""Unit tests of files of several ranks: slow ranks, and ranks that have lost their part."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from engine.kv_files.jobs import ReadJob, WriteJob
from engine.kv_files.storage.folder import FolderStorage
from tests.fakes.engine.kv_file_ranks import TwoRanks
from tests.fakes.engine.kv_file_stores import BLOCK_BYTES, chain_of, open_store
from tests.fakes.time.waiting import wait_until
from tests.unit.kv_files.test_file_tier import Clock, ask, load, run, store_of, tier_of

IDENTITY = "a1-0"  # the leader's folder; the second rank's is a1-1


def write(ranks: TwoRanks, num_blocks: int = 8) -> list[bytes]:
    chain = chain_of(1, num_blocks)
    ranks.stores.write(WriteJob(IDENTITY, chain, 0, range(num_blocks), lambda place: True))
    return chain


def read(ranks: TwoRanks, chain: list[bytes]) -> ReadJob:
    job = ReadJob(IDENTITY, chain, 0, range(len(chain)))
    ranks.stores.read(job)
    return job


def test_a_read_is_not_given_up_because_another_rank_needs_longer(tmp_path: Path) -> None:
    engine = load(tmp_path)
    tier, clock = tier_of(engine), Clock()
    with TwoRanks(store_of(engine), tmp_path) as ranks:
        tier._store = ranks.stores
        expected = ask(engine)
        run(engine)
        counts = ranks.stores.counts, ranks.second.counts
        wait_until(lambda: [one.runs["written"] for one in counts] == [1, 1], "both have written")
        engine.block_pool.reset_prefix_cache()
        tier._clock = tier._reading._clock = clock
        tier._token_s = 0.1  # computing the eight blocks takes 12.8 s
        ranks.files.gate.clear()
        request = ask(engine)
        ((_, job),) = tier._reads[0].jobs
        wait_until(lambda: job.num_read == 8, "the leader has read its part")
        assert job.num_done == 0
        clock.now = 1.9
        engine.schedule()
        assert request.awaits_prefix
        ranks.files.gate.set()
        run(engine)
        assert (request.num_hit_tokens, tier._reading.is_on) == (8 * 16, True)
        assert request.output_token_ids == expected.output_token_ids
        engine.close()


def test_a_stopped_read_also_stops_a_slower_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderStorage, "chunk_bytes", BLOCK_BYTES)
    own, _ = open_store(tmp_path)
    with TwoRanks(own, tmp_path) as ranks:
        chain = write(ranks)
        ranks.files.gate.clear()
        job = ReadJob(IDENTITY, chain, 0, range(len(chain)))
        reading = Thread(target=ranks.stores.read, args=(job,))
        reading.start()
        wait_until(lambda: job.num_read == 8, "the leader has read its part")
        assert ranks.files.stands.wait(60)
        job.stop.set()
        wait_until(lambda: ranks.reader.poll(0), "the second rank is told")
        ranks.files.gate.set()
        reading.join()
        assert job.num_done == 1, "the second rank stops after the block that it reads"
        assert read(ranks, chain).num_done == 8


def test_what_one_rank_has_lost_is_written_again(tmp_path: Path) -> None:
    own, _ = open_store(tmp_path)
    with TwoRanks(own, tmp_path) as ranks:
        chain = write(ranks)
        (path,) = tmp_path.glob("a1-1/*/*.kv")
        path.unlink()
        assert read(ranks, chain).num_done == 0
        assert not own.index.runs_of(IDENTITY, chain), "no other prompt waits for half of the files"
        write(ranks)
        assert read(ranks, chain).num_done == 8


def test_a_rank_that_has_not_listed_its_files_yet_lists_them_before_it_reads(
    tmp_path: Path,
) -> None:
    """Regression: right after a start, or when another node had just written, nothing was read.

    The leader also forgot its own part of the files.
    """
    own, _ = open_store(tmp_path)
    with TwoRanks(own, tmp_path, may_scan=False) as ranks:
        with TwoRanks(open_store(tmp_path)[0], tmp_path) as others:
            chain = write(others)
        own.scan()
        job = ReadJob(IDENTITY, chain, 0, range(len(chain)))
        reading = Thread(target=ranks.stores.read, args=(job,))
        reading.start()
        wait_until(lambda: job.num_read == 8, "the leader has read its part")
        ranks.may_scan.set()
        reading.join()
        assert (job.num_done, job.causes) == (8, ())
        assert own.index.runs_of(IDENTITY, chain)
