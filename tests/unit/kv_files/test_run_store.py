"""Unit tests of KV files: look-ups, refused files, and the order of removal."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest

from baton.api.errors import ConfigError
from baton.kv.cache_use import CacheUse
from baton.link import wire
from baton.link.words import NodeBeat
from engine.kv_files import run_index, run_store
from engine.kv_files.jobs import WriteJob
from engine.kv_files.run_file import LAST_BYTES, RunName, UnusableError, header_bytes
from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.secret import SECRET
from engine.kv_files.storage.storage import FoundFile, Listing
from tests.fakes.engine.kv_file_stores import (
    BLOCK_BYTES,
    IDENTITY,
    Blocks,
    chain_of,
    folder_of,
    open_store,
    read,
    write,
)
from tests.fakes.engine.kv_file_systems import (
    DISK_FULL,
    CountingFiles,
    ForbiddingFiles,
    TroubledFiles,
    VanishingFiles,
)

NUM_BLOCKS = 8


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*/*/*.kv")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*/*.kv"))


def test_a_chain_is_read_after_a_restart(tmp_path: Path) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path)
    assert read(store, blocks, chain).num_done == NUM_BLOCKS
    assert read(store, blocks, chain, first=3).num_done == NUM_BLOCKS - 3
    longer = read(store, blocks, [*chain, b"x" * 32])
    assert (longer.num_done, longer.causes) == (NUM_BLOCKS, ("absent",))


def test_a_folder_that_only_root_may_list_hides_no_files(tmp_path: Path) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    (tmp_path / "lost+found").mkdir()
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path, files=ForbiddingFiles())
    assert read(store, blocks, chain).num_done == NUM_BLOCKS


def test_part_of_a_file_serves_a_prompt_that_branches_off(tmp_path: Path) -> None:
    chain, other = chain_of(1, NUM_BLOCKS), chain_of(2, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path)
    job = read(store, blocks, [*chain[:5], *other[5:]])
    assert (job.num_done, job.causes) == (5, ("absent",))


def test_files_on_a_full_disk_are_read(tmp_path: Path) -> None:
    chain, files = chain_of(1, NUM_BLOCKS), TroubledFiles()
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path, files=files)
    files.write_error = DISK_FULL
    assert read(store, blocks, chain).num_done == NUM_BLOCKS


def test_a_read_opens_few_of_many_files_with_the_same_first_block(tmp_path: Path) -> None:
    common, files = chain_of(0, 1), CountingFiles()
    chains = [[*common, *chain_of(seed, 4)] for seed in range(1, 80)]
    for chain in chains:  # a new node does not know that the first block is in a file
        write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path, files=files)
    files.num_opened = 0
    assert read(store, blocks, chains[0]).num_done == 5, "the name tells that this file fits"
    assert files.num_opened == 32 + 1
    assert read(store, blocks, [*common, *chain_of(100, 4)]).num_done == 1
    assert files.num_opened == 32 + 1 + 32 + 1


def test_turns_of_a_conversation_lie_in_few_files(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path)
    for num_turns in range(1, 9):
        write(store, blocks, chain_of(1, 4 * num_turns))
        assert len(names(tmp_path)) == num_turns.bit_count()
    write(store, blocks, chain_of(1, 64))
    assert len(names(tmp_path)) == 1, "one read brings the whole conversation"
    restarted, _ = open_store(tmp_path)
    assert read(restarted, blocks, chain_of(1, 64)).num_done == 64


def test_runs_that_half_the_limit_cannot_join_are_both_kept(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path, limit_bytes=36_000, memory=Blocks(90))
    for num_blocks in (40, 90):
        write(store, blocks, chain_of(1, num_blocks))
    places = [(name.start, name.num_blocks) for name in map(RunName.parse, names(tmp_path)) if name]
    assert sorted(places) == [(0, 40), (40, 50)]


def test_a_long_chain_is_written_as_runs_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv_files.run_store._MAX_RUN_BYTES", 20 * BLOCK_BYTES)
    store, blocks = open_store(tmp_path)
    write(store, blocks, chain_of(1, 50))
    places = [(name.start, name.num_blocks) for name in map(RunName.parse, names(tmp_path)) if name]
    assert sorted(places) == [(0, 20), (20, 20), (40, 10)]
    restarted, _ = open_store(tmp_path)
    assert read(restarted, blocks, chain_of(1, 50)).num_done == 50


def test_a_chain_of_more_than_half_the_limit_is_written_in_part(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path, limit_bytes=36_000, memory=Blocks(200))
    write(store, blocks, chain_of(1, 200))
    assert [name.num_blocks for name in map(RunName.parse, names(tmp_path)) if name] == [70]


def test_nothing_is_written_twice_or_for_few_tokens(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path)
    write(store, blocks, chain_of(1, 3))
    assert names(tmp_path) == []
    write(store, blocks, chain_of(1, NUM_BLOCKS))
    write(store, blocks, chain_of(1, NUM_BLOCKS))
    write(store, blocks, chain_of(1, NUM_BLOCKS + 3))
    assert store.counts.runs["written"] == len(names(tmp_path)) == 1


def spoil(rng: random.Random, content: bytes, other: bytes, kind: str) -> bytes:
    """Return a file's content, spoilt in one of the ways of `KINDS`."""
    data_start = len(content) - NUM_BLOCKS * BLOCK_BYTES
    new = bytearray(content)
    if kind == "truncated":
        return content[: rng.randrange(len(content))]
    if kind == "flipped":
        header = 12 + int.from_bytes(content[8:12], "little") + 16  # zeros follow, up to the data
        ranges = [range(12), range(12, header), range(data_start, len(content))]
        new[rng.choice(rng.choice(ranges))] ^= 1 << rng.randrange(8)
        return bytes(new)
    if kind == "blocks swapped":
        places = rng.sample(range(NUM_BLOCKS), 2)
        one, two = (
            slice(data_start + p * BLOCK_BYTES, data_start + (p + 1) * BLOCK_BYTES) for p in places
        )
        new[one], new[two] = new[two], new[one]
        return bytes(new)
    return other


# Ways to spoil a file, and the causes of which one must be counted. A flipped bit may be one of a
# length, or of an identity.
KINDS = {
    "truncated": {"short"},
    "flipped": {"damaged", "short", "foreign"},
    "blocks swapped": {"damaged"},
    "other chain": {"foreign"},
    "renamed": {"foreign"},
    "other tenant": {"foreign"},
    "other layout": {"foreign"},
    "other identity": {"foreign"},
    "other secret": {"damaged"},
}


def file_of_another(folder: Path, secret: bytes, kind: str, seed: int) -> bytes:
    """Return the content of a file that must not serve the chain of a seed."""
    folder.mkdir(parents=True)
    if kind != "other secret":
        (folder / SECRET).write_bytes(secret)
        (folder / SECRET).chmod(0o600)
    memory = Blocks(block_bytes=2 * BLOCK_BYTES) if kind == "other layout" else Blocks()
    store, _ = open_store(folder, memory=memory)
    salt = b"tenant" if kind == "other tenant" else b""
    # A run of another length, or of other tokens, gets the name of the right run.
    size = NUM_BLOCKS - (kind == "renamed")
    write(store, memory, chain_of(seed + (kind == "other chain"), size, salt))
    content = only_file(folder).read_bytes()
    if kind == "other identity":  # the header names the identity that wrote the file
        content = content.replace(IDENTITY.encode(), b"b2", 1)
    return content


@pytest.mark.parametrize(
    ("num_draws", "num_spoilt"), [(25, 1125), pytest.param(223, 10_035, marks=pytest.mark.large)]
)
def test_thousands_of_spoilt_files_are_refused(
    num_draws: int, num_spoilt: int, tmp_path: Path
) -> None:
    rng, num_counted = random.Random(5), 0
    for seed in range(5):
        right, chain = tmp_path / f"right-{seed}", chain_of(seed, NUM_BLOCKS)
        write(*open_store(right), chain)
        path = only_file(right)
        content, secret = path.read_bytes(), (right / SECRET).read_bytes()
        for kind, allowed in KINDS.items():
            other = file_of_another(tmp_path / f"{kind}-{seed}", secret, kind, seed)
            for draw in range(num_draws):
                path.write_bytes(spoil(rng, content, other, kind))
                store, blocks = open_store(right)
                job = read(store, blocks, chain)
                assert job.num_done == 0, (seed, kind, draw)
                assert len(set(job.causes) & allowed) == 1, (seed, kind, draw, job.causes)
                assert names(right) == [], "a spoilt file is removed"
                num_counted += 1
    assert num_counted == num_spoilt


def test_a_header_whose_text_is_no_utf_8_is_damaged(tmp_path: Path) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(IDENTITY.encode(), b"\xc4(", 1))
    assert read(*open_store(tmp_path), chain).causes == ("damaged",)
    assert names(tmp_path) == []


def test_files_of_other_identities_are_not_found(tmp_path: Path) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path)
    job = read(store, blocks, chain, identity="b2")
    assert (job.num_done, job.causes) == (0, ("absent",))


def test_long_runs_may_be_unused_for_longer_before_they_leave(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path, limit_bytes=36_000)
    write(store, blocks, chain_of(1, 40))  # about 16 kB
    write(store, blocks, chain_of(2, 4))
    for run in store.index.oldest_first(0.0):
        run.used_at -= 100.0
        os.utime(tmp_path / run.path, (run.used_at, run.used_at))
    write(store, blocks, chain_of(3, 60))  # about 20 kB
    assert store.counts.files_evicted == 1
    found = {RunName.parse(name) for name in names(tmp_path)}
    assert sorted(name.num_blocks for name in found if name) == [40, 60]
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 36_000
    assert store.counts.bytes_stored == store.index.num_bytes <= 36_000


def test_a_file_that_another_node_reads_stays_longer(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path, limit_bytes=36_000)
    for seed in (1, 2):
        write(store, blocks, chain_of(seed, 30))  # about 12 kB
    for run in store.index.oldest_first(0.0):
        run.used_at -= 100.0 if run.name.first == chain_of(2, 1)[0] else 200.0
        os.utime(tmp_path / run.path, (run.used_at, run.used_at))
    other, more = open_store(tmp_path)
    assert read(other, more, chain_of(1, 30)).num_done == 30
    write(store, blocks, chain_of(3, 40))
    firsts = {name.first for name in map(RunName.parse, names(tmp_path)) if name}
    assert firsts == {chain_of(1, 1)[0], chain_of(3, 1)[0]}
    assert store.counts.files_evicted == 1


@pytest.mark.parametrize("how", ["listing", "making room"])
def test_a_use_by_another_node_moves_a_run_in_a_bounded_look_up(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only the times changed, so later runs hid the one that is in use."""
    monkeypatch.setattr(run_index, "MAX_ALIKE", 2)
    common = chain_of(0, 1)
    chains = [[*common, *chain_of(seed, 19)] for seed in range(1, 5)]  # about 9 kB each
    for number, chain in enumerate(chains):
        # A new node does not know that the first block is in a file
        writer, blocks = open_store(tmp_path)
        write(writer, blocks, chain)
        (run,) = (run for _, run in writer.index.runs_of(IDENTITY, chain) if run.hashes)
        used_at = time.time() - 400.0 + 100.0 * number
        os.utime(tmp_path / run.path, (used_at, used_at))
    store, blocks = open_store(tmp_path, limit_bytes=40_000)

    def considered() -> set[int]:
        found = {run.name.last for _, run in store.index.runs_of(IDENTITY, common)}
        return {number for number, chain in enumerate(chains) if chain[-1][:LAST_BYTES] in found}

    assert considered() == {2, 3}
    assert read(*open_store(tmp_path), chains[0]).num_done == 20
    if how == "listing":
        folder = f"{IDENTITY}/{common[0].hex()[:2]}"
        store._note_folder(Listing(folder, FileSystem().list_files(tmp_path / folder)))
        assert considered() == {0, 3}, "the other runs keep their order"
    else:
        write(store, blocks, chain_of(9, 20))
        assert store.counts.files_evicted == 1
        assert considered() == {0, 3}


def test_two_nodes_share_a_folder(tmp_path: Path) -> None:
    (one, blocks), (two, more) = open_store(tmp_path), open_store(tmp_path)
    chain = chain_of(1, NUM_BLOCKS)
    write(one, blocks, chain)
    write(two, more, chain)  # the second writer replaces a file of the same name
    assert len(names(tmp_path)) == 1
    assert read(one, blocks, chain).num_done == NUM_BLOCKS
    later = chain_of(3, NUM_BLOCKS)
    write(two, more, later)
    one.scan()
    assert read(one, blocks, later).num_done == NUM_BLOCKS
    two._drop(two.index.runs_of(IDENTITY, later)[0][1])
    assert read(one, blocks, later).causes == ("gone",)


def test_a_file_that_another_node_removes_after_the_read_is_no_error(tmp_path: Path) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path, files=VanishingFiles())
    job = read(store, blocks, chain)
    assert (job.num_done, job.causes, names(tmp_path)) == (NUM_BLOCKS, (), [])


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    folder, chain = tmp_path / "kv", chain_of(1, NUM_BLOCKS)
    store, blocks = open_store(folder)
    write(store, blocks, chain)
    store.scan()
    shutil.rmtree(folder)
    store.scan()
    assert (len(store.index), store.counts.bytes_stored) == (0, 0)
    write(store, blocks, chain)
    assert read(store, blocks, chain).num_done == NUM_BLOCKS


def test_other_users_cannot_enter_any_folder(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path / "kv")
    write(store, blocks, chain_of(1, NUM_BLOCKS))
    folders = [path for path in (tmp_path / "kv").rglob("*") if path.is_dir()]
    assert len(folders) == 2
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kv", *folders)} == {0o700}


def test_a_block_that_changes_while_it_is_written_is_not_stored(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path)
    chain, answers = chain_of(1, NUM_BLOCKS), iter([True, False])
    job = read(store, blocks, chain)
    assert job.causes == ("absent",)
    store.write(WriteJob(IDENTITY, chain, 0, range(NUM_BLOCKS), lambda place: next(answers)))
    assert (names(tmp_path), store.counts.runs["skipped"]) == ([], 1)
    assert not [path for path in tmp_path.glob("*/*/*") if path.is_file()]


def test_a_node_starts_while_the_disk_is_full(tmp_path: Path) -> None:
    chain, files = chain_of(1, NUM_BLOCKS), TroubledFiles()
    write(*open_store(tmp_path), chain)
    files.write_error = DISK_FULL
    store, blocks = open_store(tmp_path, files=files)
    assert read(store, blocks, chain).num_done == NUM_BLOCKS


def test_nothing_is_left_of_a_secret_that_cannot_be_written(tmp_path: Path) -> None:
    class FullDisk(FileSystem):
        def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
            path.touch()
            raise OSError(DISK_FULL, os.strerror(DISK_FULL))

    with pytest.raises(ConfigError, match=f"kv_files: .*{os.strerror(DISK_FULL)}"):
        open_store(tmp_path, files=FullDisk())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["open to all", "of another user"])
def test_a_secret_that_others_know_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path)
    if kind == "open to all":
        (tmp_path / SECRET).chmod(0o604)
    else:
        fstat = os.fstat

        def fstat_of_another(descriptor: int) -> os.stat_result:
            found = fstat(descriptor)
            return os.stat_result((*found[:4], 12345, *found[5:]))

        # Root of a container with one user cannot give files away.
        monkeypatch.setattr(os, "fstat", fstat_of_another)
        monkeypatch.setattr(os, "geteuid", lambda: 23456)
    with pytest.raises(ConfigError, match=r"kv_files: .*secret: belongs to another user, or"):
        open_store(tmp_path)


def test_a_limit_without_room_for_a_run_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path, limit_bytes=8 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="kv_files_size: must be at least 2048 for this model"):
        open_store(tmp_path, limit_bytes=8 * BLOCK_BYTES - 1)


@pytest.mark.parametrize("kind", ["a file", "a short secret"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "kv"
    if kind == "a file":
        folder.write_text("x")
    else:
        folder.mkdir()
        (folder / SECRET).write_bytes(os.urandom(5))
        (folder / SECRET).chmod(0o600)
    with pytest.raises(ConfigError, match=r"kv_files: .*kv"):
        open_store(folder)


def test_many_files_are_found_at_a_start(tmp_path: Path) -> None:
    first, _ = open_store(tmp_path)
    for number in range(2000):
        name = RunName(number.to_bytes(32, "big")[::-1], b"x" * 16, 0, 4, 64)
        path = tmp_path / IDENTITY / str(name)[:2] / str(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    first.scan()
    assert len(first.index) == 2000


def test_the_age_of_read_blocks_is_counted(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path)
    chain = chain_of(1, NUM_BLOCKS)
    write(store, blocks, chain)
    ((_, run),) = store.index.runs_of(IDENTITY, chain)
    for used_s, first in ((100.0, 2), (10.0, 0)):
        run.used_at -= used_s
        read(store, blocks, chain, first=first)
    assert sum(store.counts.ages.counts) == NUM_BLOCKS - 2 + NUM_BLOCKS
    assert store.counts.ages.sum_s == pytest.approx(100 * 6 + 10 * 8, abs=60)


def test_an_old_listing_forgets_no_run_that_was_written_later(tmp_path: Path) -> None:
    store, blocks = open_store(tmp_path)
    began_at = time.time() - 1.0
    write(store, blocks, chain_of(1, NUM_BLOCKS))
    ((_, run),) = store.index.runs_of(IDENTITY, chain_of(1, NUM_BLOCKS))
    store._note_folder(Listing(run.folder, (), began_at))
    assert len(store.index) == 1
    store._note_folder(Listing(run.folder, (), time.time() + 1.0))
    assert len(store.index) == 0


@pytest.mark.parametrize("numbers", ["0-4-1" + "0" * 900, "9" * 400 + "-4-64", "0-64-4", "-1-4-64"])
def test_a_name_with_senseless_numbers_is_no_run(numbers: str) -> None:
    """Regression: a file without a sensible number of tokens made `_make_room` raise."""
    name = f"{'ab' * 32}-{'cd' * 16}-{numbers}.kv"
    assert RunName.parse(name) is None
    assert RunName.parse(name.replace(numbers, "0-4-64")) is not None


def test_a_header_longer_than_its_blocks_need_is_not_read(tmp_path: Path) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    path = only_file(tmp_path)
    content = path.read_bytes()
    magic, length = content[:8], int.from_bytes(content[8:12], "little")
    most = header_bytes(content, NUM_BLOCKS)
    assert most < 4096
    path.write_bytes(magic + (2 * length).to_bytes(4, "little") + content[12:])
    store, blocks = open_store(tmp_path)
    assert read(store, blocks, chain).causes == ("damaged",)
    with pytest.raises(UnusableError):
        header_bytes(magic + (2**26).to_bytes(4, "little"), 2**10)


def test_a_run_with_more_blocks_than_a_node_writes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path)
    monkeypatch.setattr(run_store, "_MAX_RUN_BYTES", (NUM_BLOCKS - 1) * BLOCK_BYTES)
    assert read(store, blocks, chain).causes == ("foreign",)


def test_sizes_that_a_faulty_server_reports_fit_into_a_beat(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    storage = folder_of(store)
    files = [FoundFile(f"{number:02x}00-00-0-8-64.kv", 2**63, 1.0) for number in range(9)]
    listings = [Listing(f"{IDENTITY}/{file.name[:2]}", [file]) for file in files]
    with mock.patch.object(storage, "list_changes", return_value=listings):
        store.scan()
    assert store.counts.files_stored == len(files)
    beat = NodeBeat(cache=CacheUse(file_bytes=store.counts.bytes_stored))
    wire.node_event_to_proto(beat)  # otherwise, no beat would reach the router
