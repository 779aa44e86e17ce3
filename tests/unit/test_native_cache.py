"""Tests of the C library's cache: no other user's file is loaded."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from baton.kernel_library import build
from baton.kernel_library.build import find_library, open_library
from baton.kernel_library.compilers import BuildError, Compilers

pytestmark = pytest.mark.medium  # some start processes

NAME = "key.so"
BUILT = b"what the compiler made"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library belongs; builds take no time."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(build, "find_compiler", lambda: ["cc"])
    monkeypatch.setattr(build, "_key", lambda *arguments: NAME.removesuffix(".so"))
    monkeypatch.setattr(build, "compile_library", lambda *arguments: BUILT)
    return tmp_path / "cache" / "native"


def content() -> bytes:
    opened = open_library()
    with os.fdopen(opened.descriptor, "rb") as file:
        assert opened.path.name == NAME
        return file.read()


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what lies there another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_what_is_built_is_ours_alone_and_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = os.umask(0)
    try:
        assert content() == BUILT
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [NAME]
    monkeypatch.setattr(build, "compile_library", lambda *arguments: b"again")
    assert content() == BUILT


def test_a_file_that_others_can_write_is_built_anew(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(b"planted")
    (folder / NAME).chmod(0o664)
    assert content() == BUILT


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "planted").write_bytes(b"planted")
    (folder / NAME).symlink_to(tmp_path / "planted")
    assert content() == BUILT
    assert (tmp_path / "planted").read_bytes() == b"planted"
    (folder / NAME).unlink()
    os.link(tmp_path / "planted", folder / NAME)  # one that is changed elsewhere
    assert content() == BUILT
    assert (tmp_path / "planted").read_bytes() == b"planted"


def test_what_is_no_file_is_no_library_and_holds_nobody_up(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(folder / NAME)
    assert content() == BUILT


def test_another_users_file_is_built_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / NAME).write_bytes(b"planted")
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    give_away(folder / NAME, monkeypatch)
    assert content() == BUILT


def test_another_users_folder_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True, mode=0o755)
    give_away(folder, monkeypatch)
    with pytest.raises(BuildError, match=re.escape(f"{folder}: must belong to user ")) as caught:
        content()
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_a_link_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    opened = open_library()
    os.close(opened.descriptor)
    assert opened.path.parent == tmp_path / f"baton-native-{os.geteuid()}"
    assert opened.problem.startswith(f"{folder}: ")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_our_own_loose_folder_is_tightened(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert content() == BUILT
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_for_temporary_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a read-only home cost the compiled kernels, and tokens came five times slower."""
    folder.parent.write_bytes(b"a file, which not even root makes a folder in")
    opened = open_library()
    os.close(opened.descriptor)
    assert opened.path == tmp_path / f"baton-native-{os.geteuid()}" / NAME
    assert opened.path.parent.stat().st_mode & 0o777 == 0o700
    assert opened.problem == f"{folder}: File exists"
    monkeypatch.setattr(build, "compile_library", lambda *arguments: b"again")
    assert content() == BUILT
    assert find_library() == opened.path


def test_a_folder_that_runs_full_costs_no_second_build(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[bytes] = []
    store = build._store

    def store_or_fail(content: bytes, name: str, folder_fd: int) -> None:
        if os.path.samestat(os.fstat(folder_fd), folder.stat()):
            raise OSError(errno.ENOSPC, "No space left on device")
        store(content, name, folder_fd)

    def compile_and_note(*arguments: object) -> bytes:
        built.append(BUILT)
        return BUILT

    monkeypatch.setattr(build, "_store", store_or_fail)
    monkeypatch.setattr(build, "compile_library", compile_and_note)
    assert content() == BUILT
    assert built == [BUILT]


def test_where_no_folder_can_be_written_one_line_names_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    folder.parent.write_bytes(b"")
    with pytest.raises(BuildError) as caught:
        open_library()
    assert str(caught.value).count(": File exists") == 2
    assert find_library() is None


def test_one_process_builds_and_the_others_wait_for_its_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the prefill and the decode node compiled the same library side by side."""
    started, go_on = threading.Event(), threading.Event()
    built: list[bytes] = []

    def compile_slowly(*arguments: object) -> bytes:
        built.append(BUILT)
        started.set()
        go_on.wait(30)
        return BUILT

    monkeypatch.setattr(build, "compile_library", compile_slowly)
    with ThreadPoolExecutor(3) as at_once:
        first = at_once.submit(content)
        assert started.wait(30)
        others = [at_once.submit(content) for _ in range(2)]
        time.sleep(3 * build._LOCK_POLL_S)
        assert not any(other.done() for other in others)
        go_on.set()
        assert [one.result(30) for one in (first, *others)] == [BUILT] * 3
    assert built == [BUILT]


def test_a_library_that_is_there_is_found_and_nothing_is_built(folder: Path) -> None:
    assert find_library() is None
    assert not folder.exists()
    content()
    assert find_library() == folder / NAME
    (folder / NAME).chmod(0o664)
    assert find_library() is None


def test_compilers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Regression: compilers of a killed node went on: a driver's own children hear of no signal."""
    pid_file = tmp_path / "pid"
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {pid_file}\nwait\n")
    compiler.chmod(0o755)
    program = (
        "import sys, time; from baton.kernel_library.compilers import Compilers\n"
        "with Compilers(time.monotonic() + 300) as compilers: compilers.run(sys.argv[1:])"
    )
    builder = subprocess.Popen([sys.executable, "-c", program, str(compiler)])
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().strip().isdigit())
        child = int(pid_file.read_text())
        assert psutil.pid_exists(child)
    finally:
        builder.kill()
        builder.wait()
    wait_until(lambda: not is_running(child))


def test_compilers_end_when_one_of_them_fails(tmp_path: Path) -> None:
    with Compilers(time.monotonic() + 60) as compilers:
        left = subprocess.Popen(["sleep", "300"], process_group=compilers.group)
        with pytest.raises(BuildError, match="/bin/false: exit status 1"):
            compilers.run(["/bin/false"])
    assert left.wait(30) == -signal.SIGKILL


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
