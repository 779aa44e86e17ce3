"""KV files: the first token of a long prompt after a restart, and the cost without any hit.

    prefix   one prompt of 8,000 tokens: computed; read by a new engine that has been idle, from the
             page cache and from the disk; read from the page cache by a new engine at once
    larger   as prefix, with random weights in Qwen3-0.6B's shape, in bfloat16
    nobody   requests with different prompts, with and without `--kv-files`, in turns
    start    the time until 10,000 files with 10 GiB are known
    troubles the long prompt with a disk of 2 MB/s, a full disk or read errors; compared with an
             engine without files
    turns    a conversation of 8,192 tokens, written in 1 to 31 turns and so in 1 to 5 files, read
             from the page cache; blocks of SmolLM2 in float32, without an engine

SmolLM2-135M-Instruct with 4-bit weights except in the part larger, in this process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console

from baton import LLM, SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from benchmarks.engine_cpu.engine_cpu import WORKS, make_checkpoint
from benchmarks.runner.run import Document, Run
from engine.kv_files.jobs import ReadJob, WriteJob
from engine.kv_files.run_file import RunName
from engine.kv_files.run_index import RunIndex
from engine.kv_files.run_store import RunStore
from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.folder import FolderStorage
from engine.kv_files.storage.storage import StorageTerms
from examples.demo import fetch_model

PARTS = ("prefix", "nobody", "start", "troubles")  # unless others are chosen
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
ANSWER = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
NUM_FILES, FILE_BYTES = 10_000, 2**20
SLOW_BYTES_PER_S = 2e6
AT_ONCE = "at once"  # read from the page cache, by an engine without any idle time
PLACES = ("page cache", "disk", AT_ONCE)
TROUBLES = ("slow disk", "full disk", "read errors")


class _Blocks:
    """Memory with blocks, for a store without an engine."""

    def __init__(self, num_blocks: int = 0, block_bytes: int = 2**20) -> None:
        self.block_bytes, self.in_use = block_bytes, Lock()
        self._memory = memoryview(bytearray(num_blocks * block_bytes))

    def contents(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        size = self.block_bytes
        return [self._memory[i * size : (i + 1) * size] for i in block_ids]

    room_for = contents

    def put(self, block_ids: Sequence[int], parts: Sequence[memoryview]) -> None:
        """Do nothing: the parts are the memory."""


class _TroubledFiles(FileSystem):
    """Files on a slow disk, on a full disk, or on a disk with read errors, by ``kind``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def read_into(self, descriptor: int, offset: int, parts: Sequence[memoryview]) -> int:
        if self._kind == "read errors" and offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        num_read = super().read_into(descriptor, offset, parts)
        if self._kind == "slow disk":
            time.sleep(num_read / SLOW_BYTES_PER_S)
        return num_read

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        if self._kind == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_new(path, parts)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Return a prompt that differs from those of other seeds from the first token on."""
    return [100 + (seed * 977 + 31 * place) % 20_000 for place in range(num_tokens)]


def load(model: str, num_tokens: int, **options: Any) -> LLM:
    """Load the model with a KV cache for one long prompt and some short ones."""
    return LLM(model, num_blocks=num_tokens // 16 + 400, **options)


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """Return the seconds until a prompt's first token, and the token."""
    began_at = time.perf_counter()
    (completion,) = llm.generate([prompt], FIRST_TOKEN)
    return time.perf_counter() - began_at, tuple(completion.token_ids)


def drop_pages(folder: Path) -> None:
    """Drop the files' contents from the page cache, so that reads come from the disk."""
    for path in folder.glob("*/*/*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def be_idle(llm: LLM) -> None:
    """Let the engine do what it does while no request is open: it populates KV memory."""
    while llm.engine.do_idle_work():
        pass


def measure_prefix(run: Run, model: str, tokens: int, repetitions: int) -> Document:
    """Measure a long prompt's first token, computed and read."""
    times: dict[str, list[float]] = {"computed": [], **{place: [] for place in PLACES}}
    tokens_read: dict[str, list[int]] = {place: [] for place in PLACES}
    num_bytes = 0
    plain = load(model, tokens)
    first_token_s(plain, prompt_of(999, 600))  # kernels and memory are warm
    for seed in range(repetitions):
        prompt = prompt_of(seed, tokens)
        with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder:
            seconds, token = first_token_s(plain, prompt)
            times["computed"].append(seconds)
            writer = load(model, tokens, kv_files=folder)
            writer.generate([prompt], FIRST_TOKEN)
            writer.engine.close()
            num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*/*/*.kv"))
            for place in PLACES:
                if place == "disk":
                    drop_pages(Path(folder))
                reader = load(model, tokens, kv_files=folder)
                first_token_s(reader, prompt_of(999, 600))
                if place != AT_ONCE:
                    be_idle(reader)
                seconds, found = first_token_s(reader, prompt)
                counts = reader.metrics().kv_files
                assert counts is not None
                few = place != AT_ONCE and counts.tokens_read < tokens - 16
                if found != token or few:
                    run.problems.append(f"{place}: token {found}, computed {token}; {counts}")
                times[place].append(seconds)
                tokens_read[place].append(counts.tokens_read)
                reader.engine.close()
                del reader
        print({name: [round(one, 3) for one in found] for name, found in times.items()})
        print("tokens read:", tokens_read)
    return {
        "seconds": {name: statistics.median(found) for name, found in times.items()},
        "all": times,
        "tokens_read": tokens_read,
        "file_bytes": num_bytes,
        "tokens": tokens,
    }


def measure_nobody(run: Run, model: str, repetitions: int) -> Document:
    """Measure requests that find nothing, with and without files, in turns."""
    times: dict[str, list[float]] = {"plain": [], "files": []}
    with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder:
        llms = {"plain": load(model, 4096), "files": load(model, 4096, kv_files=folder)}
        for repetition in range(repetitions + 1):
            order = list(llms)[:: 1 if repetition % 2 else -1]
            for name in order:
                prompts = [prompt_of(1000 * repetition + place, 300) for place in range(8)]
                began_at = time.perf_counter()
                llms[name].generate(prompts, ANSWER)
                if repetition:  # the first batch warms memory
                    times[name].append(time.perf_counter() - began_at)
        counts = llms["files"].metrics().kv_files
        llms["files"].engine.close()
    ratios = [files / plain for files, plain in zip(times["files"], times["plain"], strict=True)]
    written = 0 if counts is None else counts.bytes_written
    return {"ratio": statistics.median(ratios), "all": times, "written_bytes": written}


def measure_troubles(run: Run, model: str, tokens: int, repetitions: int) -> Document:
    """Measure a long prompt without files, and with files on each troubled disk, in turns."""
    names = ("plain", *TROUBLES)
    times: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder:
        prompts = [prompt_of(seed, tokens) for seed in range(repetitions)]
        writer = load(model, tokens, kv_files=folder)
        said = [writer.generate([prompt], FIRST_TOKEN)[0].token_ids for prompt in prompts]
        writer.engine.close()
        for seed, prompt in enumerate(prompts):
            for name in names:
                llm = load(model, tokens, **({} if name == "plain" else {"kv_files": folder}))
                if llm.engine.features.files is not None:
                    store = llm.engine.features.files._store
                    assert isinstance(store, RunStore)
                    storage = store._storage
                    assert isinstance(storage, FolderStorage)
                    storage._files = _TroubledFiles(name)
                    if name == "full disk":  # a read finds nothing
                        store.index = RunIndex()
                first_token_s(llm, prompt_of(999, 600))
                seconds, found = first_token_s(llm, prompt)
                times[name].append(seconds)
                if found != tuple(said[seed]):
                    run.problems.append(f"{name}: token {found}, computed {said[seed]}")
                llm.engine.close()
                del llm
            print({name: [round(one, 3) for one in found] for name, found in times.items()})
    pairs = {name: zip(times[name], times["plain"], strict=True) for name in TROUBLES}
    ratios = {name: statistics.median(one / plain for one, plain in pairs[name]) for name in pairs}
    return {"ratios": ratios, "all": times, "tokens": tokens}


def measure_start() -> Document:
    """Measure how long it takes until all files of a folder are known."""
    with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder:
        for number in range(NUM_FILES):
            first = (number * 2_654_435_761 % 2**32).to_bytes(4, "big") * 8
            name = str(RunName(first, first[:16], 0, 64, 1024))
            path = Path(folder) / "identity" / name[:2] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, FILE_BYTES)
        began_at = time.perf_counter()
        store = RunStore(FolderStorage(StorageTerms(folder)), 2**40, _Blocks(), 16)
        store.scan()
        seconds = time.perf_counter() - began_at
    return {"seconds": seconds, "files": len(store.index), "bytes": store.index.num_bytes}


def measure_turns(repetitions: int) -> Document:
    """Measure how long it takes to read one conversation from few and from several files."""
    num_blocks, memory = 512, _Blocks(512, 16 * 23_040)
    chain = [hashlib.blake2b(bytes([i % 256, i // 256])).digest()[:32] for i in range(num_blocks)]
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder:
        stores: dict[str, RunStore] = {}
        for turns in (1, 8, 15, 31):
            storage = FolderStorage(StorageTerms(f"{folder}/{turns}"))
            store = RunStore(storage, 2**40, memory, 16)
            for turn in range(1, turns + 1):
                end = num_blocks * turn // turns
                store.write(WriteJob("a", chain[:end], 0, range(end), lambda place: True))
            stores[f"{turns} turns, {len(store.index)} files"] = store
        for _ in range(repetitions):
            for name, store in stores.items():
                job = ReadJob("a", chain, 0, range(num_blocks))
                began_at = time.perf_counter()
                store.read(job)
                seconds.setdefault(name, []).append(time.perf_counter() - began_at)
                assert job.num_done == num_blocks, job.causes
    return {"seconds": {name: statistics.median(found) for name, found in seconds.items()}}


def run(
    run: Run, part: Sequence[str] = PARTS, tokens: int = 8000, repetitions: int = 3
) -> Document:
    """Measure the chosen parts one after another; other parts keep their results and dates.

    Args:
        part: some of prefix, larger, nobody, start, troubles, turns.
        tokens: tokens of the long prompt.
        repetitions: number of long prompts, and of pairs of batches.
    """
    found = fetch_model(Console(), SMOLLM2)
    if found is None:
        raise SystemExit("the model cannot be had")
    document = run.saved_parts(part)
    if "start" in part:
        document["start"] = measure_start()
    if "prefix" in part:
        document["prefix"] = measure_prefix(run, str(found), tokens, repetitions)
    if "larger" in part:
        folder = make_checkpoint(WORKS["0.6B"])
        document["larger"] = measure_prefix(run, str(folder), tokens, repetitions)
    if "nobody" in part:
        document["nobody"] = measure_nobody(run, str(found), 4 * repetitions)
    if "troubles" in part:
        document["troubles"] = measure_troubles(run, str(found), tokens, repetitions)
    if "turns" in part:
        document["turns"] = measure_turns(5 * repetitions)
    return document
