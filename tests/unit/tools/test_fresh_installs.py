"""Fresh installs: the quickstart's commands, and the table of what was measured."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks.served.fresh_installs import sizes, table, wheels_table
from benchmarks.served.installs.systems import CPU_BUILD, SYSTEMS, System, documented_commands

MEASURED = {
    "torch": "PyPI",
    "install_s": 1234,
    "installed_mb": 5678,
    "ready_s": 9.5,
    "answered_s": 10.5,
    "memory_mib": 700,
    "kernels": ["built ahead for x86-64-v3"],
}


def test_every_tool_has_a_command_that_takes_the_cpu_build() -> None:
    commands = documented_commands()
    assert list(commands) == ["pip", "uv", "pipx", "uvx"]
    for command in commands.values():
        assert "'baton-serve[node]'" in command
        assert "/whl/cpu" in command or "--torch-backend cpu" in command


@pytest.mark.parametrize("one", SYSTEMS, ids=lambda one: one.name)
def test_a_system_runs_the_command_of_the_page(one: System) -> None:
    if one.torch == CPU_BUILD:
        assert one.command == documented_commands()[one.tool]
    else:
        assert one.command in (
            "pip install 'baton-serve[node]'",
            "uv pip install 'baton-serve[node]'",
        )


def test_the_table_shows_what_was_measured_and_what_failed() -> None:
    first, second, *_ = SYSTEMS
    lines = table({second.name: MEASURED, first.name: {"failed": "no space"}}).splitlines()
    assert lines[2].startswith("| Debian 12, x86_64 | 3.11 | pip | failed: no space |")
    numbers = "| PyPI | 1,234 | 5,678 | 9.5 | 10.5 | 700 | x86-64-v3 |"
    assert lines[3] == f"| Debian 12, x86_64 | 3.11 | uv {numbers}"
    assert len({line.count("|") for line in lines}) == 1


def test_sizes_are_those_of_the_wheels(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "baton_serve-1-py3-none-any.whl", "w") as archive:
        archive.writestr("baton_kernels/libraries/x86-64.so", bytes(30_000))
        archive.writestr("baton_kernels/libraries/libraries.json", "{}")
    (found,) = sizes(tmp_path).values()
    assert found == {"mb": 0.03, "libraries_mb": {"x86-64": 0.03}}
    assert wheels_table(sizes(tmp_path)).splitlines()[2:] == ["| `any` | 0.0 | `x86-64` 0.03 |"]
