"""Unit tests of HeldFolder: folders of killed processes are removed, those of living ones stay."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ConfigError
from baton.processes import held_folder
from baton.processes.held_folder import HeldFolder, abandoned_folders
from baton.serving.connection_limits import RpcLimits
from baton.serving.http2.rpc_front import RpcFront

OWNER = """
import sys, time
from pathlib import Path
from typing import Any
from baton.processes.held_folder import HeldFolder
folder = HeldFolder("held-", sys.argv[1])
(folder.path / "file").touch()
print(folder.path, flush=True)
time.sleep(60)
"""


@contextmanager
def another_process(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run a process that holds a folder; yield both."""
    command = [sys.executable, "-c", OWNER, str(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            yield owner, Path(owner.stdout.readline().strip())
        finally:
            owner.kill()


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    """Regression: each `kill -9` left a folder behind for ever."""
    with another_process(tmp_path) as (owner, left):
        with HeldFolder("held-", str(tmp_path)) as own:
            assert (left / "file").exists()  # its owner lives
            assert own.path.stat().st_mode & 0o777 == 0o700
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert left.exists()
        with HeldFolder("other-", str(tmp_path)):
            assert left.exists()  # of another kind
        with HeldFolder("held-", str(tmp_path)) as own:
            assert sorted(tmp_path.iterdir()) == [own.path]
    assert not list(tmp_path.iterdir())


def test_folders_of_one_process_do_not_remove_each_other(tmp_path: Path) -> None:
    with HeldFolder("held-", str(tmp_path)) as one, HeldFolder("held-", str(tmp_path)) as other:
        assert sorted(tmp_path.iterdir()) == sorted([one.path, other.path])


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may start just between the making and the lock."""
    real, made = tempfile.mkdtemp, list[str]()

    def make(**options: Any) -> str:
        made.append(real(**options))
        if len(made) == 1:
            held_folder._remove_abandoned("held-", str(tmp_path))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with HeldFolder("held-", str(tmp_path)) as folder:
        assert folder.path.exists()
    assert len(made) == 2


def test_links_to_folders_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "held-link").symlink_to(target)
    with HeldFolder("held-", str(tmp_path)):
        assert (tmp_path / "held-link").is_symlink()
    assert target.exists()


def test_the_folders_that_nobody_holds_can_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with HeldFolder("held-"):
        (tmp_path / "held-left").mkdir()
        assert abandoned_folders("held-") == [tmp_path / "held-left"]


def test_a_server_leaves_no_folder_and_removes_what_another_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="b") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        left = Path(short) / "baton-rpc-killed"
        left.mkdir()
        (left / "grpc").touch()

        async def serve() -> None:
            front = RpcFront(RpcLimits())
            assert front.private_address.startswith(f"unix:{short}/baton-rpc-")
            assert not left.exists()
            await front.close()

        asyncio.run(serve())
        assert not list(Path(short).iterdir())


def test_without_any_folder_a_server_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(ConfigError, match=r"none can be made .*No space left"):
        RpcFront(RpcLimits())
