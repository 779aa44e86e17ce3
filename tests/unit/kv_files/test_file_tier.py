"""Unit tests of an engine with KV files: blocks that a later engine reads, and faulty disks."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton import LLM, SamplingParams
from baton.api.changes import SleepLevel
from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from baton.kv.block_hash import extra_keys_of
from baton.kv.layers import PagedKV
from engine.core.request import Request
from engine.engine import Engine
from engine.kv_files.file_tier import KVFileTier, _Read
from engine.kv_files.run_store import RunStore
from engine.kv_files.switch import FIRST_PAUSE_S
from engine.weights import ServedWeights
from engine.worker.kv_cache import KVMemory, kv_cache_spec
from node_runtime.reports.operator_views import take_ledger
from node_runtime.threads import NodeThreads
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.demo_engine import load_demo
from tests.fakes.engine.kv_file_stores import folder_of
from tests.fakes.engine.kv_file_systems import DISK_FULL, READ_ERROR, TroubledFiles
from tests.fakes.time.waiting import wait_until

PROMPT = [5 + (7 * i) % 200 for i in range(8 * 16 + 3)]  # eight blocks
NUM_OUT = 40
ANSWER = SamplingParams(max_tokens=NUM_OUT, temperature=0, ignore_eos=True)
_ids = itertools.count()


class Clock:
    """A clock that a test drives."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def load(folder: Path, **options: Any) -> Engine:
    """Load an engine that knows all files, and for which no time passes while it reads."""
    engine = load_demo(kv_files=str(folder), **options)
    stop_time(engine)
    return engine


def stop_time(engine: Engine) -> None:
    tier = tier_of(engine)
    tier._clock = Clock()
    wait_until(tier._is_scanned.is_set, "the folder is listed")


def tier_of(engine: Engine) -> KVFileTier:
    assert engine.features.files is not None
    return engine.features.files


def store_of(engine: Engine) -> RunStore:
    store = tier_of(engine)._store
    assert isinstance(store, RunStore)
    return store


def ask(engine: Engine, salt: bytes = b"", prompt: list[int] | None = None) -> Request:
    request = Request.create(
        *(f"r{next(_ids)}", PROMPT if prompt is None else prompt, ANSWER),
        seed=0,
        eos_token_ids=frozenset(),
        max_model_len=engine.max_model_len,
        extra_keys=extra_keys_of(salt),
    )
    engine.add_request(request)
    return request


def run(engine: Engine) -> None:
    while engine.requests:
        engine.step()
    engine.schedule()


def answer(engine: Engine, salt: bytes = b"") -> tuple[list[int], int]:
    """Return the tokens of an answer, and the number of cached prompt tokens."""
    request = ask(engine, salt)
    run(engine)
    return request.output_token_ids, request.num_hit_tokens


@pytest.fixture(scope="module")
def expected() -> list[int]:
    engine = load_demo()
    tokens, _ = answer(engine)
    engine.close()
    return tokens


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with the file of one answer."""
    engine = load(tmp_path)
    answer(engine)
    engine.close()
    assert tier_of(engine).counts().runs["written"] == 1
    return tmp_path


def test_a_restarted_engine_reads_eight_blocks(written: Path, expected: list[int]) -> None:
    engine = load(written)
    assert answer(engine) == (expected, 8 * 16)
    assert answer(engine, b"another tenant") == (expected, 0)
    counts = tier_of(engine).counts()
    assert (counts.hits, counts.tokens_read, counts.misses["absent"]) == (1, 8 * 16, 1)
    engine.close()
    other = load(written, block_size=32)
    assert answer(other)[1] == 0, "another layout"
    other.close()


def test_llm_reads_what_it_said_before_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_files": tmp_path, "num_blocks": 64, "num_threads": 1}
    first = LLM(str(DEMO_MODEL), **options)
    said = first.generate([PROMPT], ANSWER)[0].token_ids
    first.engine.close()
    again = LLM(str(DEMO_MODEL), **options)
    stop_time(again.engine)
    prompt = [*PROMPT, *said, 9, 10]
    tokens = again.generate([prompt], ANSWER)[0].token_ids
    known = (len(PROMPT) + NUM_OUT - 1) // 16 * 16  # the answer's last token was not computed
    assert again.metrics().cached_prompt_tokens_total == known
    plain = LLM(str(DEMO_MODEL), num_blocks=64, num_threads=1)
    assert plain.generate([prompt], ANSWER)[0].token_ids == tokens
    again.engine.close()


def test_requests_share_a_read(written: Path, expected: list[int]) -> None:
    engine = load(written)
    files = trouble(engine)
    files.gate.clear()
    requests = [ask(engine) for _ in range(2)]
    ledger = take_ledger(engine, [])
    assert (ledger.orphans, ledger.overdrawn, ledger.num_references) == ((), (), 8)
    files.gate.set()
    run(engine)
    assert [request.output_token_ids for request in requests] == [expected] * 2
    counts = tier_of(engine).counts()
    assert (counts.hits, counts.tokens_read) == (2, 8 * 16)
    assert sum(engine.block_pool.ref_counts().values()) == 0
    engine.close()


def conversation(number: int, num_shared: int, num_blocks: int = 7) -> list[int]:
    """Return a prompt of some blocks; all conversations share the first block."""
    own = [210 + number] * (16 * (num_blocks - num_shared) + 3)
    return PROMPT[: 16 * num_shared] + own


@pytest.mark.parametrize(("num_shared", "num_reads"), [(2, 2), (4, 1)])
def test_a_prompt_joins_a_read_that_brings_half_of_its_blocks(
    tmp_path: Path, num_shared: int, num_reads: int
) -> None:
    prompts = [conversation(number, num_shared) for number in range(2)]
    first = load(tmp_path)
    for prompt in prompts:
        ask(first, prompt=prompt)
        run(first)
    first.close()
    engine = load(tmp_path)
    files = trouble(engine)
    files.gate.clear()
    requests = [ask(engine, prompt=prompt) for prompt in prompts]
    assert len(tier_of(engine)._reads) == num_reads
    files.gate.set()
    run(engine)
    num_cached = [7, 7 if num_reads == 2 else num_shared]
    assert [request.num_hit_tokens // 16 for request in requests] == num_cached
    assert sum(engine.block_pool.ref_counts().values()) == 0
    engine.block_pool.check()
    engine.close()


def test_a_prompt_joins_a_read_that_brings_all_that_files_have(tmp_path: Path) -> None:
    first = load(tmp_path)
    ask(first, prompt=conversation(0, 4))
    run(first)
    first.close()
    engine = load(tmp_path)
    files = trouble(engine)
    files.gate.clear()
    requests = [ask(engine, prompt=conversation(*sizes)) for sizes in ((0, 4), (1, 4, 14))]
    assert len(tier_of(engine)._reads) == 1
    files.gate.set()
    run(engine)
    assert [request.num_hit_tokens // 16 for request in requests] == [7, 4]
    engine.close()


def trouble(engine: Engine) -> TroubledFiles:
    """Give an engine's tier files with faults."""
    files = folder_of(store_of(engine))._files = TroubledFiles()
    return files


def test_a_slow_read_costs_no_more_than_its_deadline(written: Path, expected: list[int]) -> None:
    engine = load(written)
    tier, files, clock = tier_of(engine), trouble(engine), Clock()
    tier._clock = tier._reading._clock = clock
    files.gate.clear()
    late = ask(engine)
    assert files.stands.wait(60)
    engine.step()
    assert late.awaits_prefix
    clock.now += 2.1
    run(engine)
    assert (late.output_token_ids, late.num_hit_tokens) == (expected, 0)
    assert tier.counts().misses["late"] == 1
    # The thread may still write to the blocks, so nobody else gets them.
    assert sum(engine.block_pool.ref_counts().values()) == 8
    assert answer(engine, b"other")[0] == expected
    files.gate.set()
    wait_until(lambda: all(read.has_ended for read in tier._reads), "the read ends")
    engine.schedule()
    assert sum(engine.block_pool.ref_counts().values()) == 0
    engine.block_pool.check()
    engine.close()


@pytest.mark.parametrize(("share_read", "wait_s"), [(0.0, 2.0), (0.5, 5.0), (1.0, 10.0)])
def test_a_read_may_take_longer_if_it_will_end_before_the_deadline(
    written: Path, share_read: float, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt was computed before, so the time to compute a token is unknown."""
    monkeypatch.setattr(_Read, "share", share_read)
    engine = load(written)
    tier, files, clock = tier_of(engine), trouble(engine), Clock()
    tier._clock = tier._reading._clock = clock
    files.gate.clear()
    request = ask(engine)
    assert files.stands.wait(60)
    clock.now = wait_s
    engine.schedule()
    assert request.awaits_prefix
    clock.now += 0.01
    engine.schedule()
    assert not request.awaits_prefix
    files.gate.set()
    run(engine)
    wait_until(lambda: all(read.has_ended for read in tier._reads), "the read ends")
    engine.schedule()
    engine.close()


def test_a_read_slower_than_computing_is_given_up_soon(written: Path, expected: list[int]) -> None:
    engine = load(written)
    tier, files, clock = tier_of(engine), trouble(engine), Clock()
    tier._clock = tier._reading._clock = clock
    tier._token_s = 0.1  # computing the eight blocks takes 12.8 s
    files.gate.clear()
    request = ask(engine)
    assert files.stands.wait(60)
    clock.now = 0.64
    engine.schedule()
    assert request.awaits_prefix
    clock.now = 0.65
    engine.schedule()
    assert not request.awaits_prefix
    assert (tier.counts().misses["late"], tier._reading.is_on) == (1, False)
    files.gate.set()
    run(engine)
    assert (request.output_token_ids, request.num_hit_tokens) == (expected, 0)
    engine.close()


@pytest.mark.parametrize("when", ["reading", "writing"])
def test_after_an_error_files_are_tried_again_later(
    written: Path, expected: list[int], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(written)
    tier, files, clock = tier_of(engine), trouble(engine), Clock()
    tier._reading._clock = tier._writing._clock = clock
    files.read_error = READ_ERROR if when == "reading" else 0
    files.write_error = DISK_FULL if when == "writing" else 0
    salts = iter([b"", b"", b""] if when == "reading" else [b"1", b"2", b"3"])

    def counted() -> tuple[int, int, int]:
        counts = tier.counts()
        misses = counts.misses
        if when == "reading":
            return misses["error"], misses["off"], counts.hits
        return counts.runs["failed"], 0, counts.runs["written"]

    def asked() -> None:
        if when == "reading":
            engine.block_pool.reset_prefix_cache()
        assert answer(engine, next(salts))[0] == expected

    with caplog.at_level(logging.INFO, logger="engine.kv_files.switch"):
        asked()
        wait_until(lambda: counted() == (1, 0, 0), "the first try fails")
        asked()
        files.read_error = files.write_error = 0
        assert counted() == (1, int(when == "reading"), 0)
        clock.now += FIRST_PAUSE_S
        asked()
        wait_until(lambda: counted()[2] == 1, "files work again")
        wait_until(lambda: len(caplog.records) >= 2, "the writer has logged the end of the pause")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert "is off for a while" in lines[0]
    assert "works again" in lines[1]
    engine.close()


def test_full_memory_is_not_taken_for_reads(
    written: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv_files.file_tier.FREE_SHARE", 0.5)
    engine = load(written)
    held = engine.block_pool.allocate(20) or []
    request = ask(engine)
    run(engine)
    assert request.output_token_ids == expected
    assert request.num_hit_tokens == 6 * 16, "at most half of the free blocks"
    assert tier_of(engine).counts().misses["no_blocks"] == 1
    engine.block_pool.release(held)
    engine.close()


def test_a_sleep_drops_what_is_read_and_written(written: Path, expected: list[int]) -> None:
    engine = load(written)
    files = trouble(engine)
    files.gate.clear()
    request = ask(engine)
    assert files.stands.wait(60)
    engine.abort(request.request_id)
    engine.block_pool.reset_prefix_cache()
    engine.features.forget_cached()
    files.gate.set()
    wait_until(lambda: all(read.has_ended for read in tier_of(engine)._reads), "it ends")
    engine.schedule()
    assert engine.block_pool.num_cached == 0
    assert sum(engine.block_pool.ref_counts().values()) == 0
    assert answer(engine)[0] == expected
    engine.close()


def test_blocks_of_an_open_read_do_not_enter_a_flushed_cache(
    written: Path, expected: list[int]
) -> None:
    engine = load(written)
    files = trouble(engine)
    files.gate.clear()
    waiting = ask(engine)
    assert files.stands.wait(60)
    node = SimpleNamespace(
        _loaded=SimpleNamespace(engine=engine),
        _loop=SimpleNamespace(call=lambda flush: flush()),
    )
    NodeThreads.flush_prefix_cache(cast("NodeThreads", node))
    assert not waiting.awaits_prefix
    assert not tier_of(engine)._coming
    files.gate.set()
    wait_until(lambda: all(read.has_ended for read in tier_of(engine)._reads), "it ends")
    engine.features.settle_files()
    assert engine.block_pool.num_cached == 0
    run(engine)
    assert (waiting.output_token_ids, waiting.num_hit_tokens) == (expected, 0)
    assert sum(engine.block_pool.ref_counts().values()) == 0
    engine.block_pool.check()
    engine.close()


def test_no_thread_copies_blocks_while_a_sleep_frees_their_memory(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(written)
    locked: dict[str, bool] = {}

    def note(name: str, *arguments: object) -> list[None]:
        locked[name] = store_of(engine).memory.in_use.locked()
        return [None]

    monkeypatch.setattr(engine.executor, "collective_rpc", note)
    ServedWeights(engine, DEMO_MODEL).sleep(SleepLevel.HOST)
    assert locked == {"sleep": True}
    assert not store_of(engine).memory.in_use.locked()
    engine.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_files_bytes": 2**30}, "kv_files_size: needs kv_files"),
        ({"kv_files": "x", "prefix_cache": False}, "kv_files: needs prefix_cache"),
        (
            {"kv_files": "x", "tensor_parallel_size": 2, "executor": "ray"},
            "kv_files: needs all ranks on one machine, got the executor ray",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(**options)


def test_no_error_of_a_listing_ends_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scan(store: RunStore) -> None:
        raise ValueError("an odd answer")

    monkeypatch.setattr(RunStore, "scan", scan)
    engine = load(tmp_path)
    assert tier_of(engine)._writer._thread.is_alive()
    assert "the files cannot be listed: an odd answer" in caplog.text
    engine.close()


def test_blocks_of_every_dtype_are_bytes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        spec = kv_cache_spec([PagedKV(2, 32)] * 2, 16, dtype, [(1.0, 1.0)] * 2, torch.float32)
        tensor = torch.randn((5, *spec.block_shape)).to(spec.tensor_dtype)
        blocks = KVMemory(spec, tensor).open_bytes()
        assert blocks.block_bytes == spec.block_bytes
        saved = [bytes(part) for part in blocks.contents([3, 1])]
        for part, new in zip(blocks.room_for([0, 4]), saved, strict=True):
            part[:] = new
        assert torch.equal(tensor[[0, 4]].view(torch.uint8), tensor[[3, 1]].view(torch.uint8))
