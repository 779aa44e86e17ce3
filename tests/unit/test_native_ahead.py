"""Tests of libraries built ahead: the best for a CPU is loaded, and none that others can write."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.kernel_library import ahead, build
from baton.kernel_library.ahead import INSTRUCTION_SETS, best_for_cpu, open_library_built_ahead
from baton.kernel_library.compilers import BuildError
from baton.kernel_library.state import find_kernels
from baton.kernel_library.switch import SWITCH_VARIABLE

SETS = [one for one in INSTRUCTION_SETS if one.machine == platform.machine()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries for all instruction sets, each with the flags that it is compiled with."""
    monkeypatch.setattr(build, "find_compiler", lambda: ["cc"])
    monkeypatch.setattr(ahead, "run_tool", lambda command: "cc 1.0\nof somebody")
    monkeypatch.setattr(
        build, "compile_library", lambda sources, compiler, flags, limit: " ".join(flags).encode()
    )
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(SWITCH_VARIABLE, raising=False)
    made = tmp_path / "libraries"
    made.mkdir(mode=0o755)
    ahead.build_libraries(made)
    monkeypatch.setenv(ahead.FOLDER_VARIABLE, str(made))
    return made


@pytest.fixture
def wheel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the libraries those of an installed wheel that a group of users can write."""
    monkeypatch.delenv(ahead.FOLDER_VARIABLE)
    monkeypatch.setattr(ahead, "find_packaged_libraries", lambda: folder)
    folder.chmod(0o775)
    return folder


def opened() -> tuple[str, bytes]:
    found = open_library_built_ahead()
    assert found is not None
    with os.fdopen(found.descriptor, "rb") as file:
        assert found.instruction_set == found.path.stem
        return found.instruction_set, file.read()


def has_all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozenset(name for one in SETS for name in one.needs)
    monkeypatch.setattr(ahead, "cpu_features", lambda: features)


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
    assert open_library_built_ahead() is None


def test_what_others_can_write_is_not_loaded(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(BuildError, match="must belong to user"):
        open_library_built_ahead()
    folder.chmod(0o755)
    for file in folder.glob("*.so"):
        file.chmod(0o666)
    with pytest.raises(BuildError, match=r"\.so: must belong to user"):
        open_library_built_ahead()


def test_what_is_not_what_was_built_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in folder.glob("*.so"):
        file.write_bytes(b"other")
    with pytest.raises(BuildError, match="has changed since it was built"):
        open_library_built_ahead()
    index = json.loads((folder / "libraries.json").read_text())
    (folder / "libraries.json").write_text(json.dumps({**index, "sources": "others"}))
    with pytest.raises(BuildError, match="other sources"):
        open_library_built_ahead()
    (folder / "libraries.json").write_text("[]")
    with pytest.raises(BuildError, match="cannot be read"):
        open_library_built_ahead()
    monkeypatch.setenv(ahead.FOLDER_VARIABLE, str(folder / "nowhere"))
    with pytest.raises(BuildError, match="nowhere: No such file"):
        open_library_built_ahead()


@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_the_switch_forces_an_instruction_set(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, one: ahead.InstructionSet
) -> None:
    has_all_features(monkeypatch)
    monkeypatch.setenv(SWITCH_VARIABLE, one.name.upper())
    name, content = opened()
    assert name == one.name
    assert content == " ".join([*build.FLAGS, build.THREADS, *one.flags]).encode()


def test_a_forced_set_that_this_cpu_lacks_is_an_error(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "cpu_features", lambda: frozenset[str]())
    monkeypatch.setenv(SWITCH_VARIABLE, SETS[0].name)
    with pytest.raises(BuildError, match=f"no library {SETS[0].name} for this CPU"):
        open_library_built_ahead()
    monkeypatch.setattr(ahead, "find_packaged_libraries", lambda: None)
    with pytest.raises(BuildError, match=f"=.*{SETS[0].name}: no library built ahead"):
        open_library_built_ahead()


def test_advice_names_the_variable_that_keeps_kernels_away(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler would not help there."""
    has_all_features(monkeypatch)
    assert find_kernels().advice == ""
    for file in wheel.glob("*.so"):
        file.write_bytes(b"other")
    assert find_kernels().advice.startswith("install Baton again")
    monkeypatch.setenv(SWITCH_VARIABLE, "sse9")
    assert find_kernels().advice == f"unset {SWITCH_VARIABLE}"
    monkeypatch.setenv(ahead.FOLDER_VARIABLE, "/nowhere")
    assert find_kernels().advice == f"unset {ahead.FOLDER_VARIABLE}"


def test_an_unknown_value_of_the_switch_is_an_error(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, "sse9")
    with pytest.raises(BuildError, match=r"must be one of 0, 1, build, .*, got sse9"):
        open_library_built_ahead()


def build_is_asked_for(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, "build")


def compiler_chooses_the_cpu(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.setenv("CC", "gcc -march=x86-64-v3")


def cpu_has_no_library(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")


def sources_were_edited(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.setattr(build, "digest_of_sources", lambda sources: "others")


@pytest.mark.parametrize(
    "change",
    [build_is_asked_for, compiler_chooses_the_cpu, cpu_has_no_library, sources_were_edited],
)
def test_a_library_is_built_here_only_if_asked_or_if_the_wheel_has_none(
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    has_all_features(monkeypatch)
    monkeypatch.setenv("CC", "gcc")  # a compiler alone does not ask for a build
    assert opened()[0] == SETS[0].name
    change(monkeypatch, wheel)
    assert open_library_built_ahead() is None


def test_a_named_folder_wins_over_the_wheel(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.build_libraries(tmp_path / "wheel", SETS[-1:])
    monkeypatch.setattr(ahead, "find_packaged_libraries", lambda: tmp_path / "wheel")
    has_all_features(monkeypatch)
    assert opened()[0] == SETS[0].name


def test_a_damaged_library_of_the_wheel_is_an_error(wheel: Path) -> None:
    for file in wheel.glob("*.so"):
        file.write_bytes(b"other")
    with pytest.raises(BuildError, match="has changed since it was built"):
        open_library_built_ahead()


def test_only_libraries_of_another_recipe_are_built_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def compile_and_note(*arguments: object) -> bytes:
        built.append("one")
        return b"new"

    monkeypatch.setattr(build, "compile_library", compile_and_note)
    ahead.build_libraries(folder)
    assert not built
    (folder / f"{SETS[0].name}.so").write_bytes(b"damaged")
    ahead.build_libraries(folder)
    assert len(built) == 1
    monkeypatch.setattr(ahead, "run_tool", lambda command: "cc 2.0")
    ahead.build_libraries(folder)
    assert len(built) == 1 + len(SETS)


def test_a_cross_compiler_builds_for_another_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    files = ahead.build_libraries(tmp_path / "other", machine=other)
    assert [one.stem for one in files] == [
        one.name for one in INSTRUCTION_SETS if one.machine == other
    ]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=f"apt install gcc-{other}-linux-gnu"):
        ahead.build_libraries(tmp_path / "other", machine=other)
