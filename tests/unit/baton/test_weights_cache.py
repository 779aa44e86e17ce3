"""Unit tests of packed weights in files: complete or absent, checked at each boot, limited."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from baton.checkpoint import weights_cache
from baton.checkpoint.weights_cache import (
    CacheEntry,
    WeightsCache,
    WeightsCacheError,
    identify_files,
    used_bytes,
)

MIB = 2**20
CACHE = WeightsCache(8 * MIB)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights_cache, "_YOUNG_NS", 0)
    return tmp_path / "cache" / "weights"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def write(entry: CacheEntry, size: int = MIB) -> None:
    content = os.urandom(size)
    entry.write([(0, memoryview(content[:100])), (128, memoryview(content[128:]))], {"a": [1]})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


def test_what_was_written_is_mapped(source: Path) -> None:
    first, second = os.urandom(100), os.urandom(20 * MIB + 5)
    with WeightsCache(64 * MIB).hold([source], "int8") as entry:
        assert entry.open() is None
        entry.write([(64, memoryview(first)), (192, memoryview(second))], {"a": [1]})
        found = entry.open()
    assert found is not None
    assert found.index == {"a": [1]}
    assert found.data_bytes == 192 + len(second)
    assert found.content[:64] == bytes(64)
    assert found.content[64:164] == first
    assert found.content[192 : found.data_bytes] == second
    with pytest.raises(TypeError):
        found.content[0] = 1


def test_an_entry_belongs_to_one_packing_of_one_file(source: Path, tmp_path: Path) -> None:
    with CACHE.hold([source], "int8") as entry:
        write(entry)
    for packing, content in (("int8", b""), ("int4", b""), ("int8", b"others!")):
        if content:
            source.write_bytes(content)
        with CACHE.hold([source], packing) as entry:
            assert (entry.open() is not None) == (packing == "int8" and not content)
    copied = tmp_path / "other.safetensors"
    copied.write_bytes(b"others!")
    assert identify_files([source]) != identify_files([copied])


def test_a_file_that_changed_a_moment_ago_is_no_source(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "_YOUNG_NS", 10**12)
    with pytest.raises(WeightsCacheError, match=r"model\.safetensors changed a moment ago"):
        identify_files([source])


@pytest.mark.parametrize("at", [0, 300, -1, -40, -200])
def test_damage_is_found_at_the_first_start_of_each_boot(
    source: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    with CACHE.hold([source], "int8") as entry:
        write(entry, 4096)
        [path] = files(folder)
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        boot = tmp_path / "boot_id"
        boot.write_text("01234567-89ab-cdef")
        monkeypatch.setattr(weights_cache, "_BOOT_ID", boot)
        assert entry.open() is None
        assert not files(folder)
        write(entry, 4096)
        assert entry.open() is not None


def test_a_file_of_an_earlier_boot_is_read_once(
    source: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(weights_cache, "_BOOT_ID", boot)
    with CACHE.hold([source], "int8") as entry:
        boot.write_text("00000000-0001")
        write(entry)
        boot.write_text("00000000-0002")
        assert entry.open() is not None
        assert [path.name for path in files(folder)] == [f"{entry.key}-000000000002.weights"]
        [path] = files(folder)
        with path.open("r+b") as file:
            file.write(b"x")
        assert entry.open() is not None  # only the index is read again
        boot.unlink()  # the system does not tell: all is read at each start
        assert entry.open() is None


def test_a_cut_file_or_one_that_others_can_write_is_not_used(source: Path, folder: Path) -> None:
    for spoil in (lambda path: os.truncate(path, 50), lambda path: path.chmod(0o622)):
        with CACHE.hold([source], "int8") as entry:
            write(entry)
            spoil(files(folder)[0])
            assert entry.open() is None


def test_the_files_used_longest_ago_make_room(source: Path, folder: Path) -> None:
    names = {}
    for number in range(4):  # each takes 3 of 8 MiB
        with CACHE.hold([source], str(number)) as entry:
            write(entry, 3 * MIB)
            names[number] = entry.key
            [path] = folder.glob(f"{entry.key}-*.weights")
            os.utime(path, (0, time.time() - 1000 + number))
    assert {path.name[:32] for path in files(folder)} == {names[2], names[3]}
    with CACHE.hold([source], "2") as entry:
        assert entry.open() is not None  # used now
    with CACHE.hold([source], "4") as entry:
        write(entry, 3 * MIB)
        assert {path.name[:32] for path in files(folder)} == {names[2], entry.key}
        with pytest.raises(WeightsCacheError, match="--weights-cache"):
            write(entry, 9 * MIB)
    assert 6 * MIB < used_bytes() < 7 * MIB


def test_abandoned_and_unused_files_are_removed(source: Path, folder: Path) -> None:
    with CACHE.hold([source], "old") as entry:
        write(entry)
    abandoned = folder / f"{'0' * 32}-00000000.new"
    abandoned.touch()
    for path in folder.iterdir():
        os.utime(path, (0, time.time() - 40 * 24 * 3600))
    with CACHE.hold([source], "new") as entry:
        write(entry)
        assert [path.name[:32] for path in files(folder)] == [entry.key]
    assert not abandoned.exists()


def test_a_full_disk_leaves_nothing_behind(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CACHE.hold([source], "int8") as entry:
        monkeypatch.setattr(weights_cache, "_SPARE_DISK_BYTES", 2**60)
        with pytest.raises(WeightsCacheError, match="too little disk space"):
            write(entry)
        monkeypatch.setattr(weights_cache, "_SPARE_DISK_BYTES", 0)

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(weights_cache, "_write_all", fail)
        with pytest.raises(WeightsCacheError, match="No space left on device"):
            write(entry)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_whoever_waits_too_long_packs_for_itself(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "_LOCK_TIMEOUT_S", 0.0)
    with CACHE.hold([source], "int8"):
        waiting = CACHE.hold([source], "int8")
        with pytest.raises(WeightsCacheError, match="another process has packed them for"), waiting:
            pass
        with CACHE.hold([source], "int4"):
            pass
    with CACHE.hold([source], "int8"):
        pass
