"""Unit tests of KV files that cannot be read: one file must not turn reading off for all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.storage import UnreachableError
from tests.fakes.engine.kv_file_stores import IDENTITY, chain_of, open_store, read, write
from tests.fakes.engine.kv_file_systems import READ_ERROR, TroubledFiles

NUM_BLOCKS = 8


class ForeignFiles(TroubledFiles):
    """Files of this machine; one of them belongs to another user.

    A test that runs as root cannot make a file that it may not open.

    Attributes:
        foreign: the other user's file.
    """

    foreign = Path()

    def open(self, path: Path) -> int:
        if path == self.foreign:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().open(path)


def make_foreign(path: Path, files: ForeignFiles) -> None:
    files.foreign = path


def make_link(path: Path, files: ForeignFiles) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def make_folder(path: Path, files: ForeignFiles) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [make_foreign, make_link, make_folder])
def test_an_unreadable_file_is_a_miss_and_the_other_files_are_read(
    spoil: Callable[[Path, ForeignFiles], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files, chains = ForeignFiles(), [chain_of(seed, NUM_BLOCKS) for seed in (1, 2)]
    for chain in chains:
        write(*open_store(tmp_path), chain)
    store, blocks = open_store(tmp_path, files=files)
    ((_, run),) = store.index.runs_of(IDENTITY, chains[0])
    spoil(tmp_path / run.path, files)
    assert read(store, blocks, chains[0]).causes == ("error",)
    assert read(store, blocks, chains[0]).causes == ("absent",), "the file was forgotten"
    assert read(store, blocks, chains[1]).num_done == NUM_BLOCKS
    assert len(caplog.records) == 1, "a warning names the file"
    assert run.path in caplog.text


def test_a_file_with_repeated_read_errors_is_forgotten(tmp_path: Path) -> None:
    files, chain = TroubledFiles(), chain_of(1, NUM_BLOCKS)
    store, blocks = open_store(tmp_path, files=files)
    write(store, blocks, chain)
    files.read_error = READ_ERROR
    with pytest.raises(OSError, match="Input/output error"):
        read(store, blocks, chain)
    files.read_error = 0
    assert read(store, blocks, chain).num_done == NUM_BLOCKS, "one error shows little"
    files.read_error = READ_ERROR
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            read(store, blocks, chain)
    assert read(store, blocks, chain).causes == ("absent",)
    files.read_error = 0
    write(store, blocks, chain)
    assert read(store, blocks, chain).num_done == NUM_BLOCKS, "a new file replaced the broken one"


@pytest.mark.parametrize(
    ("read_error", "list_error"),
    [(errno.ETIMEDOUT, 0), (errno.EHOSTDOWN, 0), (errno.EIO, errno.EIO)],
)
def test_a_file_server_that_is_down_costs_no_file(
    read_error: int, list_error: int, tmp_path: Path
) -> None:
    """Regression: after two errors, files were forgotten until the next listing."""
    files, chain = TroubledFiles(), chain_of(1, NUM_BLOCKS)
    store, blocks = open_store(tmp_path, files=files)
    write(store, blocks, chain)
    files.read_error, files.list_error = read_error, list_error
    for _ in range(4):
        with pytest.raises(UnreachableError, match=os.strerror(read_error)):
            read(store, blocks, chain)
    files.read_error = files.list_error = 0
    assert read(store, blocks, chain).num_done == NUM_BLOCKS


def test_only_regular_files_are_listed(tmp_path: Path) -> None:
    """Regression: a folder with the name of a run failed each write that needed room."""
    (tmp_path / "run").write_bytes(b"1234")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert [(one.name, one.num_bytes) for one in FileSystem().list_files(tmp_path)] == [("run", 4)]
