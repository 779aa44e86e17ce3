"""Unit tests of preparations for reads of KV files: the disk's bytes and the blocks' memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton import SamplingParams
from engine.core.request import Request
from engine.kv_files import run_store
from engine.kv_files.run_file import RunName
from engine.kv_files.run_index import Run
from engine.kv_files.run_store import RunStore
from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.folder import FolderStorage
from engine.worker.host import pages_ahead
from engine.worker.host.pages_ahead import PagesAhead
from tests.fakes.engine.demo_engine import load_demo
from tests.fakes.engine.kv_file_stores import BLOCK_BYTES, chain_of, open_store, read, write
from tests.fakes.engine.kv_file_systems import TroubledFiles
from tests.fakes.time.waiting import wait_until

NUM_BLOCKS, AHEAD_BLOCKS = 10, 3
PROMPT = [5 + (7 * i) % 200 for i in range(8 * 16 + 3)]  # eight blocks


class RecordingFiles(FileSystem):
    """Files of this machine that record what is read, and what the system is told to read soon.

    Attributes:
        calls: name, offset and number of bytes of each call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def read_soon(self, descriptor: int, offset: int, num_bytes: int) -> None:
        self.calls.append(("soon", offset, num_bytes))
        super().read_soon(descriptor, offset, num_bytes)

    def read_into(self, descriptor: int, offset: int, parts: Sequence[memoryview]) -> int:
        self.calls.append(("read", offset, sum(part.nbytes for part in parts)))
        return super().read_into(descriptor, offset, parts)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderStorage, "chunk_bytes", 2 * BLOCK_BYTES)
    monkeypatch.setattr(run_store, "_AHEAD_BYTES", AHEAD_BLOCKS * BLOCK_BYTES)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("first", "num_blocks"), [(0, 10), (0, 7), (3, 10), (9, 10)])
def test_all_bytes_are_announced_once_before_they_are_read(
    tmp_path: Path, first: int, num_blocks: int
) -> None:
    chain, files = chain_of(1, NUM_BLOCKS), RecordingFiles()
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path, files=files)
    files.calls.clear()
    assert read(store, blocks, chain[:num_blocks], first=first).num_done == num_blocks - first
    begin = min(offset for name, offset, _ in files.calls if name == "soon")
    told = begin
    for name, offset, num_bytes in files.calls:
        if name == "soon":
            assert offset == told, "no byte twice, and none left out"
            told += num_bytes
        elif offset:  # not the header
            assert offset + num_bytes <= told
            assert told <= offset + num_bytes + AHEAD_BLOCKS * BLOCK_BYTES
    assert told == begin + (num_blocks - first) * BLOCK_BYTES


@pytest.mark.usefixtures("small_chunks")
def test_a_system_that_cannot_read_ahead_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))

    chain = chain_of(1, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert read(*open_store(tmp_path), chain).num_done == NUM_BLOCKS
    monkeypatch.delattr(os, "posix_fadvise")
    assert read(*open_store(tmp_path), chain).num_done == NUM_BLOCKS


def test_no_prefix_is_expected_that_is_longer_than_a_request(tmp_path: Path) -> None:
    engine = load_demo(kv_files=str(tmp_path), max_model_len=400)
    tier = engine.features.files
    assert tier is not None
    name = RunName(b"first" * 4, b"last" * 4, 2**39, 1, 16)  # whoever writes files chooses names
    tier._store.index.add(Run(tier.identities[0], name, 1, 1.0))
    assert engine.features.num_expected_blocks == 400 // 16
    engine.close()


def test_an_idle_engine_prepares_memory_for_the_longest_prefix_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_demo(kv_files=str(tmp_path))
    assert first.features.num_expected_blocks == 0
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)

    def ask(name: str) -> Request:
        return Request.create(
            *(name, PROMPT, params), seed=0, eos_token_ids=frozenset(), max_model_len=400
        )

    first.add_request(ask("a"))
    while first.requests:
        first.step()
    first.schedule()
    first.close()
    num_blocks = (len(PROMPT) + 40 - 1) // 16
    assert first.features.num_expected_blocks == num_blocks

    engine = load_demo(kv_files=str(tmp_path))
    tier = engine.features.files
    assert tier is not None
    wait_until(tier._is_scanned.is_set, "the folder is listed")
    assert engine.features.num_expected_blocks == num_blocks
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", 0)
    monkeypatch.setattr(pages_ahead, "STEP_BYTES", 4096)
    pages = engine.executor.worker._pages_ahead  # type: ignore[attr-defined]
    assert isinstance(pages, PagesAhead)
    while engine.do_idle_work():
        pass
    block_bytes = pages._block_bytes
    assert 0 <= pages._next - num_blocks * block_bytes < 4096

    store, files = tier._store, TroubledFiles()
    assert isinstance(store, RunStore)
    assert isinstance(store._storage, FolderStorage)
    store._storage._files = files
    files.gate.clear()
    engine.add_request(ask("b"))
    pages._next = 0
    assert not engine.do_idle_work(), "the reading thread clears the memory that it needs"
    assert pages._next == 0
    files.gate.set()
    while engine.requests:
        engine.step()
    assert engine.do_idle_work()
    engine.close()
