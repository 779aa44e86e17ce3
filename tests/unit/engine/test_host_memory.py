"""Unit tests of host memory: limits of control groups of both versions, and the peak of a call."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.worker.host.host_memory import HostMemory, peak_growth, read_host_memory

MIB = 2**20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def mounts(tmp_path: Path) -> tuple[Path, Path]:
    """A machine of 1000 MiB, 600 of them available, without control groups."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    meminfo = f"MemTotal: {1000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {600 * 1024} kB\n"
    write(proc / "meminfo", meminfo + "HugePages_Total:       0\n")
    return proc, cgroups


def version_1(group: Path, limit: int, used: int, inactive: int = 0) -> None:
    write(group / "memory.limit_in_bytes", f"{limit}\n")
    write(group / "memory.usage_in_bytes", f"{used}\n")
    # Of the group alone, and with those below it: the limit counts the latter.
    write(group / "memory.stat", f"inactive_file 7\ntotal_inactive_file {inactive}\n")


def version_2(group: Path, limit: int | str, used: int, inactive: int = 0) -> None:
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon {used}\ninactive_file {inactive}\n")


def test_without_control_groups_it_is_the_machines(mounts: tuple[Path, Path]) -> None:
    assert read_host_memory(*mounts) == HostMemory(1000 * MIB, 600 * MIB)


def test_a_version_2_limit_counts_with_what_the_kernel_can_give_up(
    mounts: tuple[Path, Path],
) -> None:
    proc, cgroups = mounts
    write(proc / "self" / "cgroup", "0::/pod/box\n")
    version_2(cgroups / "pod" / "box", 300 * MIB, 200 * MIB, 50 * MIB)
    assert read_host_memory(*mounts) == HostMemory(300 * MIB, 150 * MIB)


def test_the_groups_above_count_too(mounts: tuple[Path, Path]) -> None:
    proc, cgroups = mounts
    write(proc / "self" / "cgroup", "0::/pod/box\n")
    version_2(cgroups / "pod" / "box", "max", 200 * MIB)
    version_2(cgroups / "pod", 400 * MIB, 390 * MIB)
    assert read_host_memory(*mounts) == HostMemory(400 * MIB, 10 * MIB)


def test_a_version_1_limit_counts_and_none_is_a_very_large_one(mounts: tuple[Path, Path]) -> None:
    proc, cgroups = mounts
    write(proc / "self" / "cgroup", "9:cpu,cpuacct:/\n4:memory:/jobs/one\n1:name=systemd:/\n")
    version_1(cgroups / "memory", 2**63 - 4096, 900 * MIB)
    version_1(cgroups / "memory" / "jobs" / "one", 500 * MIB, 100 * MIB, 20 * MIB)
    assert read_host_memory(*mounts) == HostMemory(500 * MIB, 420 * MIB)


def test_in_a_container_the_groups_path_may_be_the_hosts(mounts: tuple[Path, Path]) -> None:
    proc, cgroups = mounts
    write(proc / "self" / "cgroup", "0::/kubepods/pod1/container2\n")
    version_2(cgroups, 100 * MIB, 120 * MIB)
    assert read_host_memory(*mounts) == HostMemory(100 * MIB, 0)


def test_this_machine_has_memory() -> None:
    memory = read_host_memory()
    assert 0 < memory.available <= memory.total


def grow(num_bytes: int) -> None:
    """Fresh pages, not what the allocator still has."""
    with mmap.mmap(-1, num_bytes) as memory:
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1


def test_the_peak_of_a_call_is_its_own_and_not_one_before_it() -> None:
    grow(200 * MIB)
    assert 60 * MIB < peak_growth(lambda: grow(64 * MIB)) < 100 * MIB


def test_where_the_mark_cannot_be_reset_the_peak_is_an_upper_bound(tmp_path: Path) -> None:
    assert peak_growth(lambda: grow(64 * MIB), tmp_path) > 64 * MIB


@pytest.mark.parametrize(("system", "num_bytes"), [("linux", 2**30), ("darwin", 2**20)])
def test_the_peak_counts_in_the_units_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, num_bytes: int
) -> None:
    """Read the process's peak where there is no procfs: macOS counts bytes, others KiB."""
    monkeypatch.setattr(sys, "platform", system)
    usage = SimpleNamespace(ru_maxrss=2**20)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert peak_growth(lambda: None, tmp_path / "nowhere") == num_bytes
