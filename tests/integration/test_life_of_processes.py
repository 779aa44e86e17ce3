"""Tests that `baton up` ends all processes that it started, however it ends itself."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton import AsyncClient, Client, SamplingParams
from baton.api.errors import NodeUnavailableError
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S, deployment_config
from tests.fakes.time.waiting import wait_until

SOME = SamplingParams(max_tokens=200, ignore_eos=True)

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(200)]


@contextlib.contextmanager
def baton_up(
    folder: Path, listen: str = "", *more: str, num_children: int = 3
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A ready `baton up` and its children."""
    process = subprocess.Popen(
        [sys.executable, "-m", "baton", "up", "--model", str(DEMO_MODEL),
         "--listen", listen or free_address(), "--http-listen", free_address(),
         "--kv-cache-memory", "64M", "--log-folder", str(folder), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        for line in process.stdout:
            if "baton generate" in line:
                break
            assert time.monotonic() < give_up_at
        children = psutil.Process(process.pid).children(recursive=True)
        # The template may be about to become a reaper: then its command line names neither.
        wait_until(lambda: len(programs_of(process)) == num_children, "all programs are children")
        yield process, children
    finally:
        process.kill()
        process.communicate()


def programs_of(up: subprocess.Popen[str]) -> list[psutil.Process]:
    """The router and the nodes, which may be children of a template."""
    children = psutil.Process(up.pid).children()
    # A template becomes a reaper when all nodes are ready.
    names = ("program_template", "program_reaper")
    templates = [one for one in children if any(name in str(one.cmdline()) for name in names)]
    forked = [program for template in templates for program in template.children()]
    return [one for one in children if one not in templates] + forked


def command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ending_up_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    before = shared_memory()
    with baton_up(tmp_path) as (process, children):
        os.kill(process.pid, number)
        _, alive = psutil.wait_procs(children, timeout=15)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not alive, [p.cmdline() for p in alive]
        if number is not signal.SIGKILL:
            assert process.wait(15) == 0
    assert shared_memory() <= before


def test_one_node_does_both_where_no_prefill_node_is_wanted(tmp_path: Path) -> None:
    address = free_address()
    with baton_up(tmp_path, address, "--prefill", "0", num_children=2), Client(address) as client:
        completion = client.generate([1, 2, 3], SOME)
    assert len(completion.token_ids) == SOME.max_tokens
    assert completion.receipt is not None
    assert (completion.receipt.prefill_node, completion.receipt.decode_node) == ("", "d0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_open_when_up_is_stopped_ends_by_itself(
    number: signal.Signals, tmp_path: Path
) -> None:
    async def run(process: subprocess.Popen[str], address: str) -> list[int]:
        token_ids: list[int] = []
        async with AsyncClient(address) as client:
            async for delta in client.stream([1, 2, 3], SOME):
                if not token_ids:
                    os.kill(process.pid, number)
                token_ids += delta.token_ids
            with pytest.raises(NodeUnavailableError):  # the router is gone, or refuses
                await client.generate([1, 2, 3], SOME)
        return token_ids

    address = free_address()
    with baton_up(tmp_path, address) as (process, children):
        token_ids = asyncio.run(asyncio.wait_for(run(process, address), 60))
        assert len(token_ids) == SOME.max_tokens
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert process.wait(15) == 0


def interrupt_once_told(log: Path) -> None:
    """Press Ctrl-C as soon as the router says that it serves on."""
    wait_until(lambda: "serves on for 60 s" in log.read_text(), "the router's first stop")
    _thread.interrupt_main()


def test_a_second_ctrl_c_ends_at_once_what_would_take_its_time(tmp_path: Path) -> None:
    config = deployment_config(
        num_prefill=0, num_decode=0, router_args=["--drain-delay-s", "60"], log_folder=tmp_path
    )
    with LocalDeployment(config) as deployment:
        while "listens on" not in (tmp_path / "router.log").read_text():
            deployment.check()
            time.sleep(0.05)
        process = deployment.child("router").process
        second = threading.Thread(target=interrupt_once_told, args=(tmp_path / "router.log",))
        second.start()
        deployment.stop()
        second.join()
    assert process.returncode == -signal.SIGKILL
    assert "serves on for 60 s" in (tmp_path / "router.log").read_text()


@pytest.mark.parametrize("name", ["d0", "router"])
def test_up_starts_again_what_is_killed_and_says_so_in_words(name: str, tmp_path: Path) -> None:
    """Regression: one node's death ended everything, with `exit code -9; it printed nothing`."""
    address = free_address()
    with baton_up(tmp_path, address) as (process, _):
        word = {"d0": "decode", "router": "router"}[name]
        [victim] = [one for one in programs_of(process) if f"-m baton {word}" in command(one)]
        victim.kill()
        told = ""
        assert process.stdout is not None
        for line in process.stdout:
            told += line
            if "is ready again" in line:
                break
        assert f"{name} ended: was killed (SIGKILL)" in told or "out of memory: the kernel" in told
        assert f"log: {tmp_path / name}.log" in told
        with Client(address) as client:
            completion = client.generate([1, 2, 3], SOME)
        assert len(completion.token_ids) == SOME.max_tokens


def test_a_start_that_fails_keeps_its_logs_and_names_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "up", "--model", str(DEMO_MODEL), "--listen",
         free_address(), "--http-listen", free_address(), "--decode-args", "--kv-cache-memory 1K"],
        env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    [line] = done.stderr.splitlines()  # and not behind the table: `startingerror: ...`
    assert line.startswith("error: d0 ended: "), line
    log = Path(line.rpartition("log: ")[2])
    assert "error: " in log.read_text(encoding="utf-8")
    assert done.stdout.endswith("\n")


def test_the_audit_log_has_a_file_of_its_own(tmp_path: Path) -> None:
    with baton_up(tmp_path):
        pass
    text = (tmp_path / "router.log").read_text(encoding="utf-8")
    assert "listens on" in text
    assert '"event"' not in text
    audited = (tmp_path / "router.audit.jsonl").read_text(encoding="utf-8")
    assert '"event": "joined"' in audited


def test_a_node_that_is_told_to_stop_says_so(tmp_path: Path) -> None:
    with baton_up(tmp_path) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    for name in ("router", "p0", "d0"):
        text = (tmp_path / f"{name}.log").read_text(encoding="utf-8")
        assert "told to stop (SIGTERM)" in text
        assert text.rstrip().endswith("stopped")


def test_a_healthy_start_warns_of_nothing(tmp_path: Path) -> None:
    with baton_up(tmp_path):
        logs = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.log")}
    assert len(logs) == 3
    for text in logs.values():
        assert not [line for line in text.splitlines() if " WARNING " in line or " ERROR " in line]
