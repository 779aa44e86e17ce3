"""Test templates that a program forks of itself, in programs of their own with one thread."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[3]
HEAD = """
import asyncio, os, sys
from baton.processes.early_template import fork_template
from baton.processes.worker_processes import WorkerProcesses
from baton.processes.worker_template import WorkLimits
from tests.fakes.processes.costly_work import make_work

LIMITS = WorkLimits(cpu_s=5.0, wall_s=20.0, memory_bytes=2**26)
def make_workers(early):
    return WorkerProcesses("tests.fakes.processes.costly_work:make_work", {}, LIMITS, early=early)
"""


def start(body: str) -> subprocess.Popen[str]:
    code = HEAD + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(body: str) -> str:
    """Run a program and return what it printed."""
    process = start(body)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 0, printed
    return printed


def test_the_work_is_done_with_what_the_program_has_loaded() -> None:
    printed = run("""
        loaded = {"only": "here"}
        early = fork_template(lambda: lambda frame: loaded["only"].encode() + frame)
        workers = make_workers(early)
        async def ask():
            await workers.wait_ready()
            print(await workers.run(b" and there"), workers._template is early.process)
        asyncio.run(ask())
        workers.close()
        print(early.process.returncode)
    """)
    assert printed.split("\n") == ["b'here and there' True", "-9", ""]


def test_a_new_process_replaces_a_template_that_was_killed() -> None:
    printed = run("""
        early = fork_template(lambda: make_work({}))
        workers = make_workers(early)
        async def ask():
            first = await workers.run(b"pid()")
            early.process.kill()
            early.process.wait()
            second = await workers.run(b"pid()")
            print(first != second, early.process.poll())
        asyncio.run(ask())
        workers.close()
    """)
    assert "True -9" in printed


def test_a_template_holds_nothing_of_its_program_open() -> None:
    """Keep no file of the program open, or peers would wait for connections that it has closed."""
    printed = run("""
        reader, writer = os.pipe()
        early = fork_template(lambda: make_work({}))
        workers = make_workers(early)
        os.close(writer)
        async def ask():
            print(await workers.run(b"1 + 1"), os.read(reader, 1))
        asyncio.run(ask())
        workers.close()
    """)
    assert printed.strip() == "b'2' b''"


@pytest.mark.parametrize("is_started", [False, True])
def test_a_template_ends_with_its_program_however_that_ends(is_started: bool) -> None:
    process = start(f"""
        early = fork_template(lambda: make_work({{}}))
        workers = make_workers(early)
        async def ask():
            if {is_started}:
                await workers.wait_ready()
            print("ready", flush=True)
            await asyncio.sleep(60)
        asyncio.run(ask())
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == (4 if is_started else 1)
    process.kill()
    process.wait()
    process.stdout.close()
    ends_at = time.monotonic() + 10
    while any(child.is_running() for child in children):
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def test_a_program_with_threads_forks_no_template() -> None:
    printed = run("""
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        try:
            fork_template(lambda: make_work({}))
        except AssertionError as error:
            print(error)
    """)
    assert printed == "threads have begun\n"
