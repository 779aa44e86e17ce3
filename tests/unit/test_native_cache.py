"""The cache of the C library: nobody else's file is loaded, whatever lies there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from baton_kernels.native import build
from baton_kernels.native.build import BuildError, open_library

NAME = "key.so"
BUILT = b"what the compiler made"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library belongs; builds take no time."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "find_compiler", lambda runtime: ["cc"])
    monkeypatch.setattr(build, "_key", lambda *arguments: NAME.removesuffix(".so"))
    monkeypatch.setattr(build, "compile_library", lambda *arguments: BUILT)
    return tmp_path / "cache" / "native"


def content() -> bytes:
    descriptor, path = open_library(None)
    with os.fdopen(descriptor, "rb") as file:
        assert path.name == NAME
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
    with pytest.raises(BuildError, match=re.escape(f"{folder}: must be of user ")) as caught:
        content()
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match=r"Not a directory|Too many levels"):
        content()


def test_our_own_loose_folder_is_tightened(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert content() == BUILT
    assert folder.stat().st_mode & 0o777 == 0o700
