"""Unit tests of FolderWatch: which folders the file tier lists, and when."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.folder_watch import FolderWatch
from engine.kv_files.storage.storage import FoundFile
from tests.fakes.engine.kv_file_stores import chain_of, folder_of, open_store, read, write
from tests.unit.kv_files.test_file_tier import load, store_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports changes")


class ListedFiles(FileSystem):
    """Files of this machine; ``listed`` records the folders that were listed."""

    def __init__(self) -> None:
        self.listed: list[Path] = []

    def list_folders(self, path: Path) -> dict[str, float]:
        self.listed.append(path)
        return super().list_folders(path)

    def list_files(self, path: Path) -> list[FoundFile]:
        self.listed.append(path)
        return super().list_files(path)


def test_only_changed_folders_are_listed(tmp_path: Path) -> None:
    files = ListedFiles()
    (one, blocks), (two, more) = open_store(tmp_path, files=files), open_store(tmp_path)
    for seed in (1, 2, 3):
        write(two, more, chain_of(seed, 6))
    one.scan()
    one.scan()  # a folder changed within the last second may change again unnoticed
    files.listed.clear()
    one.scan()
    assert files.listed == [], "nothing has changed"
    longer = chain_of(2, 12)
    write(two, more, longer)
    one.scan()
    assert len(set(files.listed)) == 1
    assert read(one, blocks, longer).num_done == 12
    files.listed.clear()
    shutil.rmtree(tmp_path / two.index.runs_of("a1", chain_of(1, 6))[0][1].folder)
    one.scan()
    assert tmp_path in files.listed
    assert read(one, blocks, chain_of(1, 6)).causes == ("absent",)


def test_without_a_watch_all_folders_are_listed(tmp_path: Path) -> None:
    files = ListedFiles()
    one, blocks = open_store(tmp_path, files=files)
    folder_of(one)._watch.close()
    two, more = open_store(tmp_path)
    write(two, more, chain_of(1, 6))
    files.listed.clear()
    one.scan()
    assert tmp_path in files.listed
    assert read(one, blocks, chain_of(1, 6)).num_done == 6


def test_a_user_who_may_watch_no_further_folder_has_no_watch(tmp_path: Path) -> None:
    watch = FolderWatch()
    watch.watch_folder(tmp_path / "missing", "missing")
    assert watch.is_on, "the folder has just been removed"
    watch._libc = type("Libc", (), {"inotify_add_watch": lambda *arguments: -1})()
    watch.watch_folder(tmp_path, "a")
    assert not watch.is_on
    assert watch.take_changed() is None


def test_a_closed_engine_watches_no_folder(tmp_path: Path) -> None:
    engine = load(tmp_path)
    assert folder_of(store_of(engine))._watch.is_on
    engine.close()
    assert not folder_of(store_of(engine))._watch.is_on
