"""Wheels: which files and tags they have, with and without libraries that were built ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.wheel_hook import FOLDER_VARIABLE

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[3]


def build_wheel(folder: Path, libraries: Path | None) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(folder)]
    environment = {**os.environ, FOLDER_VARIABLE: str(libraries or "")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def tags(wheel: zipfile.ZipFile) -> set[str]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    lines = wheel.read(name).decode().splitlines()
    return {line for line in lines if line.startswith(("Tag:", "Root-Is-Purelib:"))}


def test_a_wheel_without_libraries_is_for_every_platform(tmp_path: Path) -> None:
    with build_wheel(tmp_path, None) as wheel:
        assert tags(wheel) == {"Tag: py3-none-any", "Root-Is-Purelib: true"}
        assert "baton_kernels/csrc/linear.c" in wheel.namelist()
        assert not any(name.endswith(".so") for name in wheel.namelist())


def test_a_wheel_with_libraries_is_for_their_machine_type(tmp_path: Path) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    listed = [{"name": name, "machine": "aarch64"} for name in ("armv8.2-a", "armv8-a")]
    (libraries / "libraries.json").write_text(json.dumps({"libraries": listed}))
    for one in listed:
        (libraries / f"{one['name']}.so").write_bytes(one["name"].encode())
    (libraries / "left.so").write_bytes(b"of an earlier build")
    with build_wheel(tmp_path, libraries) as wheel:
        assert tags(wheel) == {"Tag: py3-none-manylinux_2_28_aarch64", "Root-Is-Purelib: false"}
        inside = {name for name in wheel.namelist() if name.startswith("baton_kernels/libraries/")}
        names = ("libraries.json", "armv8.2-a.so", "armv8-a.so")
        assert inside == {f"baton_kernels/libraries/{name}" for name in names}
        assert wheel.read("baton_kernels/libraries/armv8-a.so") == b"armv8-a"
