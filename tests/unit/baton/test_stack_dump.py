"""Unit tests of stack dumps: at SIGUSR2, a program writes the stacks of its threads and tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton.telemetry.stack_dump import MOST_PLACES, describe_tasks
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.time.waiting import wait_until

PROGRAM = """
import asyncio, sys, threading, time
from baton.processes.process import run_program

async def wait_for_an_answer():
    await asyncio.Event().wait()

def sleep_in_a_thread():
    time.sleep(60)

async def main():
    threading.Thread(target=sleep_in_a_thread, daemon=True).start()
    tasks = [asyncio.create_task(wait_for_an_answer()) for _ in range(3)]
    await asyncio.sleep(0)
    print("ready", flush=True)
    if sys.argv[1:] == ["blocked"]:
        input()
    else:
        await asyncio.to_thread(input)

raise SystemExit(run_program(main))
"""


def dump_of(*words: str) -> str:
    """Return what a program writes to standard error at the signal; it must end well."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGUSR2)
        found = ""
        last = "in main" if words else "Event.wait"
        while last not in found:
            line = process.stderr.readline()
            assert line, found
            found += line
        _, rest = process.communicate("\n", timeout=60)
        assert process.returncode == 0, found + rest
    return found + rest


def test_the_dump_has_threads_and_tasks() -> None:
    found = dump_of()
    assert "sleep_in_a_thread" in found
    assert "tasks: 3" in found
    assert "wait_for_an_answer" in found
    assert "Event.wait" in found


def test_a_blocked_event_loop_is_shown() -> None:
    assert "in main" in dump_of("blocked")


def test_ranks_write_their_stacks_and_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM(str(DEMO_MODEL), num_blocks=64, num_threads=1, tensor_parallel_size=2)
    children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children")
    ranks = [
        int(pid)
        for pid in children.read_text().split()
        if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGUSR2)
    found = ""

    def is_written() -> bool:
        nonlocal found
        found += capfd.readouterr().err
        return "in serve" in found

    wait_until(is_written, "the rank writes its stacks")
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].token_ids
    llm.engine.close()


def test_tasks_at_one_place_are_one_stack_and_places_are_bounded() -> None:
    async def run() -> list[str]:
        async def outer(inner: Awaitable[None]) -> None:
            await inner

        async def wait() -> None:
            await asyncio.Event().wait()

        made: dict[str, object] = {}
        for number in range(MOST_PLACES + 20):  # functions at different lines
            text = "\n" * number + "async def place(wait):\n    await wait()\n"
            exec(text, made)
            made[f"place{number}"] = made["place"]
        places = [made[f"place{number}"](wait) for number in range(MOST_PLACES + 20)]  # type: ignore[operator]
        tasks = [asyncio.create_task(outer(one)) for one in (wait(), wait(), *places)]
        await asyncio.sleep(0)
        lines = list(describe_tasks(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return lines

    lines = asyncio.run(run())
    assert lines[0] == f"{MOST_PLACES + 22} tasks, at {MOST_PLACES + 21} places"
    assert lines[1] == "tasks: 2"
    assert [line.split()[-1].rpartition(".")[2] for line in lines[2:5]] == ["outer", "wait", "wait"]
    assert sum(line.startswith("tasks:") for line in lines) == MOST_PLACES


def test_an_ended_task_has_no_frames() -> None:
    async def run() -> list[str]:
        async def end() -> None:
            return None

        task = asyncio.create_task(end())
        await task
        return list(describe_tasks([task]))

    assert asyncio.run(run())[0] == "1 tasks, at 1 places"
