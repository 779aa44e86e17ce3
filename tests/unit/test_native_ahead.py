"""Libraries that are built ahead: the best one for a CPU, none that others could have written."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from baton.kernel_library import ahead, build
from baton.kernel_library.ahead import INSTRUCTION_SETS, best_for_cpu, open_library_built_ahead
from baton.kernel_library.compilers import BuildError

RUNTIME = "/somewhere/libgomp.so.1"
SETS = [one for one in INSTRUCTION_SETS if one.machine == platform.machine()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries for all instruction sets, each with the flags that it is compiled with."""
    monkeypatch.setattr(build, "find_compiler", lambda runtime: ["cc"])
    monkeypatch.setattr(
        build, "compile_library", lambda sources, compiler, flags: " ".join(flags).encode()
    )
    made = tmp_path / "libraries"
    made.mkdir(mode=0o755)
    ahead.build_libraries(made)
    monkeypatch.setenv(ahead.FOLDER_VARIABLE, str(made))
    return made


def opened() -> tuple[str, bytes]:
    found = open_library_built_ahead(RUNTIME)
    assert found is not None
    with os.fdopen(found[0], "rb") as file:
        return found[1].stem, file.read()


@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_a_cpu_gets_the_best_library_that_it_can_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, one: ahead.InstructionSet
) -> None:
    monkeypatch.setattr(ahead, "cpu_features", lambda: frozenset({"something", *one.needs}))
    name, content = opened()
    assert name == one.name
    assert one.flags[0].encode() in content


def test_all_sets_of_all_machines_are_reachable() -> None:
    libraries = [
        {"name": one.name, "machine": one.machine, "needs": list(one.needs)}
        for one in INSTRUCTION_SETS
    ]
    for one in INSTRUCTION_SETS:
        found = best_for_cpu(libraries, one.machine, frozenset(one.needs))
        assert found is not None
        assert found["name"] == one.name
    assert best_for_cpu(libraries, "riscv64", frozenset()) is None


def test_without_a_folder_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ahead.FOLDER_VARIABLE, raising=False)
    assert open_library_built_ahead(RUNTIME) is None


def test_what_others_can_write_is_not_loaded(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(BuildError, match="must be of user"):
        open_library_built_ahead(RUNTIME)
    folder.chmod(0o755)
    for file in folder.glob("*.so"):
        file.chmod(0o666)
    with pytest.raises(BuildError, match=r"\.so: must be of user"):
        open_library_built_ahead(RUNTIME)


def test_what_is_not_what_was_built_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in folder.glob("*.so"):
        file.write_bytes(b"other")
    with pytest.raises(BuildError, match="is not what was built"):
        open_library_built_ahead(RUNTIME)
    index = json.loads((folder / "libraries.json").read_text())
    (folder / "libraries.json").write_text(json.dumps({**index, "sources": "others"}))
    with pytest.raises(BuildError, match="other sources"):
        open_library_built_ahead(RUNTIME)
    (folder / "libraries.json").write_text("[]")
    with pytest.raises(BuildError, match="cannot be read"):
        open_library_built_ahead(RUNTIME)
    monkeypatch.setenv(ahead.FOLDER_VARIABLE, str(folder / "nowhere"))
    with pytest.raises(BuildError, match="nowhere: No such file"):
        open_library_built_ahead(RUNTIME)


def test_without_torchs_runtime_there_is_none(folder: Path) -> None:
    with pytest.raises(BuildError, match="OpenMP"):
        open_library_built_ahead(None)
