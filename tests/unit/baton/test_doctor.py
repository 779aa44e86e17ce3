"""`baton doctor`: what it finds on machines that lack something, and on this one."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.doctor import command, installation, machine
from baton.cli.doctor.finding import Finding, Grade
from baton.kernel_library.ahead import INSTRUCTION_SETS
from baton.kernel_library.state import ADVICE, KernelState
from baton.processes.free_address import free_address

SETS = [one for one in INSTRUCTION_SETS if one.machine == platform.machine()]
pytestmark = pytest.mark.medium  # it looks for ports and starts a compiler


def has(finding: Finding, grade: Grade, value: str, advice: str) -> None:
    """Check a finding's grade, and what its value and its advice contain."""
    assert finding.grade is grade, finding
    assert value in finding.value, finding
    assert advice in finding.advice, finding
    assert bool(finding.advice) or grade is Grade.OK, "what is wrong comes with advice"


@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_the_cpu_is_named_by_what_kernels_can_use(one: object) -> None:
    assert one in SETS
    chosen = SETS[SETS.index(one)]
    found = machine.look_at_cpu(frozenset(chosen.needs))
    assert found.value == chosen.name
    assert (found.grade is Grade.OK) == (chosen is not SETS[-1])


@pytest.mark.parametrize(("mode", "grade"), [("always", Grade.OK), ("madvise", Grade.OK),
                                             ("never", Grade.SLOW)])  # fmt: skip
def test_huge_pages(tmp_path: Path, mode: str, grade: Grade) -> None:
    modes = " ".join(f"[{m}]" if m == mode else m for m in ("always", "madvise", "never"))
    (tmp_path / "enabled").write_text(f"{modes}\n", encoding="ascii")
    found = machine.look_at_huge_pages(tmp_path / "enabled")
    has(found, grade, mode, "" if grade is Grade.OK else "echo madvise > ")
    assert machine.look_at_huge_pages(tmp_path / "none").grade is Grade.OK


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(machine.look_at_shared_memory(tmp_path / "none"), Grade.BAD, "No such file", "tmpfs")
    has(machine.look_at_shared_memory(tmp_path), Grade.OK, "GiB free", "")
    monkeypatch.setattr(machine, "_LEAST_SHARED_MEMORY", 2**80)
    has(machine.look_at_shared_memory(tmp_path), Grade.SLOW, "GiB free", "--shm-size")


def test_too_little_memory_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    has(machine.look_at_memory(), Grade.OK, "GiB free of", "")
    monkeypatch.setattr(machine, "_LEAST_MEMORY", 2**80)
    has(machine.look_at_memory(), Grade.BAD, "GiB free of", "raise the limit")


def test_one_core_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    has(machine.look_at_cores(), Grade.SLOW, "1 of 8", "--prefill 0")


def test_network_devices_that_are_up_are_named(tmp_path: Path) -> None:
    for name, state in {"lo": "unknown", "eth7": "up", "eth8": "down"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n", encoding="ascii")
    has(machine.look_at_network(tmp_path), Grade.OK, "eth7", "UCX_NET_DEVICES=eth7")
    assert machine.look_at_network(tmp_path / "none").value == "loopback only"


def test_gpus_and_a_torch_that_cannot_use_them(tmp_path: Path) -> None:
    assert machine.look_at_gpus("2.8", tmp_path, str(tmp_path)).value.startswith("none")
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 1\n")
    has(machine.look_at_gpus("2.8", tmp_path), Grade.OK, "NVIDIA H100", "")
    has(machine.look_at_gpus("2.8+cpu", tmp_path), Grade.SLOW, "NVIDIA H100", "a build for CPUs")


def test_a_missing_compiler_is_missed_only_without_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    missing = "no C compiler (cc, gcc, clang)"
    has(installation.look_at_compiler(KernelState()), Grade.SLOW, missing, ADVICE)
    has(installation.look_at_compiler(KernelState(path=Path("x.so"))), Grade.OK, missing, "")


@pytest.mark.parametrize(
    ("state", "grade", "value", "advice"),
    [
        (KernelState(path=Path("/c/x.so")), Grade.OK, "built: /c/x.so", ""),
        (
            KernelState(path=Path("/p/v3.so"), instruction_set="v3"),
            Grade.OK,
            "built ahead for v3: /p/v3.so",
            "",
        ),
        (KernelState(), Grade.OK, "not built yet", ""),
        (KernelState(problem="no cc", advice=ADVICE), Grade.SLOW, "no cc", "until then tokens"),
        (KernelState(problem="bad", advice="unset X"), Grade.SLOW, "bad", "slower: unset X"),
        (KernelState(is_off=True, advice="unset X"), Grade.SLOW, "off", "slower: unset X"),
    ],
)
def test_kernels(state: KernelState, grade: Grade, value: str, advice: str) -> None:
    has(installation.look_at_kernels(state), grade, value, advice)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    has(installation.look_at_cache(), Grade.OK, str(tmp_path / "cache"), "")
    (tmp_path / "cache" / "weights").mkdir()
    (tmp_path / "cache" / "weights" / "0-0.weights").write_bytes(bytes(3 * 2**20))
    has(installation.look_at_cache(), Grade.OK, "packed weights take 3 MiB", "")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file"))
    has(installation.look_at_cache(), Grade.SLOW, str(tmp_path / "file"), "BATON_CACHE")


def test_packages_that_nodes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    has(installation.look_at_packages(), Grade.OK, "torch", "")
    of = installation.version_of
    monkeypatch.setattr(installation, "version_of", lambda name: "" if name == "nixl" else of(name))
    has(installation.look_at_packages(), Grade.BAD, "torch", "nodes need nixl: pip install ")


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_that_is_taken_is_bad(taken: str) -> None:
    has(installation.look_at_ports(free_address(), free_address()), Grade.OK, "are free", "")
    found = installation.look_at_ports(taken, free_address())
    has(found, Grade.BAD, f"taken: {taken} (--listen)", "another address")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["doctor", *arguments])
    return done.exit_code, done.stdout


def use_ports(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have the command look at these ports: others may serve at the usual ones here."""
    look: Callable[[], Finding] = lambda: installation_look(*addresses)  # noqa: E731
    installation_look = installation.look_at_ports
    monkeypatch.setattr(installation, "look_at_ports", look)


def test_the_command_tells_all_of_it_and_ends_well_here(monkeypatch: pytest.MonkeyPatch) -> None:
    use_ports(monkeypatch, free_address(), free_address())
    code, text = run()
    assert code == 0, text
    for part in ("packages", "CPU", "cores", "memory", "GPU", "compiler", "kernels", "cache",
                 "huge pages", "shared memory", "network", "open files", "ports"):  # fmt: skip
        assert part in text
    code, text = run("--json")
    found = json.loads(text)
    assert (code, found["is_ready"]) == (0, True)
    assert {one["grade"] for one in found["findings"]} <= {"ok", "slow"}
    assert all(one.keys() == {"part", "value", "grade", "advice"} for one in found["findings"])


def test_what_keeps_up_from_working_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    use_ports(monkeypatch, taken, free_address())
    code, text = run()
    assert code == 1
    assert "bad" in text
    code, text = run("--json")
    assert (code, json.loads(text)["is_ready"]) == (1, False)


def test_it_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    page = io.StringIO()
    console = Console(file=page, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(command, "make_console", lambda: console)
    command._print([Finding("packages", "v" * 200, Grade.SLOW, "a word " * 30)])
    assert max(map(len, page.getvalue().splitlines())) <= 80
    assert page.getvalue().count("v") == 200


def test_the_last_line_says_whether_up_works() -> None:
    good = Finding("cores", "2")
    slow, bad = Finding("CPU", "old", Grade.SLOW, "x"), Finding("ports", "taken", Grade.BAD, "x")
    assert command.conclusion([good]) == "baton up works here"
    expected = "baton up works here, slower than it could: CPU"
    assert command.conclusion([good, slow]) == expected
    assert command.conclusion([good, slow, bad]) == "baton up does not work here yet: ports"
