"""Unit tests of KV files whose folder loses its key while nodes run: no node removes good files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.kv.block_key import KEY_BYTES
from engine.kv_files.run_store import RunStore
from engine.kv_files.storage.secret import SECRET
from tests.fakes.engine.kv_file_stores import (
    IDENTITY,
    Blocks,
    chain_of,
    folder_of,
    open_store,
    read,
    write,
)

NUM_BLOCKS = 8
Node = tuple[RunStore, Blocks]


def list_again(*nodes: Node) -> None:
    """Let nodes list all folders, as every node does every 30 s."""
    for store, _ in nodes:
        folder_of(store)._scan_all_at = 0.0
        store.scan()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*/*.kv")}


@pytest.mark.parametrize("what", ["the secret", "all files"])
@pytest.mark.parametrize("noticed_by", ["a listing", "a write"])
def test_a_removed_secret_is_written_again(what: str, noticed_by: str, tmp_path: Path) -> None:
    """Regression: the next node made another key, and both removed each other's files."""
    folder, chains = tmp_path / "kv", [chain_of(seed, NUM_BLOCKS) for seed in (1, 2)]
    old = open_store(folder)
    write(*old, chains[0])
    secret = (folder / SECRET).read_bytes()
    if what == "the secret":
        (folder / SECRET).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    if noticed_by == "a listing":
        list_again(old)
    else:
        write(*old, chains[1])
    assert (folder / SECRET).read_bytes() == secret
    assert (folder / SECRET).stat().st_mode & 0o777 == 0o600
    new = open_store(folder)
    write(*new, chains[1])
    list_again(old)
    assert read(*old, chains[1]).num_done == NUM_BLOCKS


def test_a_folder_that_is_gone_is_not_made_by_a_listing(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    old = open_store(folder)
    shutil.rmtree(folder)
    list_again(old)
    assert not folder.exists()


@pytest.mark.parametrize("noticed_by", ["a listing", "a read", "a write"])
def test_nodes_follow_a_replaced_secret(
    noticed_by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chains = [chain_of(seed, NUM_BLOCKS) for seed in (1, 2, 3)]
    old = open_store(tmp_path)
    write(*old, chains[0])
    (tmp_path / SECRET).unlink()
    new = open_store(tmp_path)  # starts before another node has noticed anything
    write(*new, chains[1])
    good = names(tmp_path)
    if noticed_by == "a listing":
        list_again(old)
    elif noticed_by == "a read":
        folder_of(old[0])._scan_all_at = float("inf")
        old[0]._note_folder(folder_of(old[0])._list_folder(new_folder(new, chains[1])))
        assert read(*old, chains[1]).num_done == 0
        list_again(old)
    else:
        write(*old, chains[2])
    assert names(tmp_path) == good, "no file was removed, and none was written with the old key"
    list_again(old, new)
    assert read(*old, chains[1]).num_done == NUM_BLOCKS
    write(*old, chains[2])
    list_again(new)
    assert read(*new, chains[2]).num_done == NUM_BLOCKS
    assert read(*new, chains[0]).num_done == 0, "no node has its key any more"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, warnings
    assert str(tmp_path / SECRET) in warnings[0]
    assert "was replaced" in warnings[0]


def test_a_write_that_makes_room_does_not_use_the_old_secret(tmp_path: Path) -> None:
    """Regression: making room took the new key after the digests were made with the old one."""
    old = open_store(tmp_path, limit_bytes=40_000)
    for seed in range(4):
        write(*old, chain_of(seed, 20))  # about 9 kB each
    before = names(tmp_path)
    (tmp_path / SECRET).write_bytes(bytes(KEY_BYTES))
    write(*old, chain_of(9, 20))
    assert folder_of(old[0]).secret == bytes(KEY_BYTES)
    assert names(tmp_path) <= before, "nothing was written"
    write(*old, chain_of(9, 20))
    assert len(names(tmp_path) - before) == 1


def new_folder(node: Node, chain: list[bytes]) -> str:
    """Return the folder of the run that a node has written for a chain."""
    ((_, run),) = node[0].index.runs_of(IDENTITY, chain)
    return run.folder
