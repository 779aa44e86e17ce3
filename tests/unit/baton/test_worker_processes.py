"""Unit tests of WorkerProcesses: real processes, which do what a test tells them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import psutil
import pytest

from baton.api.errors import InvalidRequestError, NodeUnavailableError, OverloadedError
from baton.processes.worker_processes import WorkerProcesses, WorkLimitError, WorkLimits

pytestmark = pytest.mark.medium

WORK = "tests.fakes.processes.costly_work:make_work"
LIMITS = WorkLimits(cpu_s=0.5, wall_s=20.0, memory_bytes=64 * 2**20)


def run(
    test: Callable[[WorkerProcesses], Awaitable[None]],
    limits: WorkLimits = LIMITS,
    *,
    max_waiting: int = 8,
) -> None:
    """Run a test, and end its processes afterwards."""
    workers = WorkerProcesses(
        WORK, {"color": "red"}, limits, num_workers=3, max_waiting=max_waiting
    )

    async def main() -> None:
        async with asyncio.timeout(60):
            await test(workers)

    try:
        asyncio.run(main())
    finally:
        workers.close()
    assert not templates()


def templates() -> list[psutil.Process]:
    """Template processes of this test (what others made ends when it is collected)."""
    return [one for one in _children() if one not in _OF_OTHERS]


_OF_OTHERS: list[psutil.Process] = []


@pytest.fixture(autouse=True)
def _note_others() -> None:
    _OF_OTHERS[:] = _children()


def _children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "worker_template" in command(one)]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def until_gone(*process_ids: int) -> None:
    while any(map(psutil.pid_exists, process_ids)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_work_is_done_by_other_processes_and_its_errors_are_raised_here() -> None:
    async def test(workers: WorkerProcesses) -> None:
        assert await workers.run(b"options['color'] * 2") == b"redred"
        assert await workers.run(b"'x' * 3_000_000") == b"x" * 3_000_000
        with pytest.raises(InvalidRequestError, match=r"^stop: is wrong$") as raised:
            await workers.run(b"refuse('stop')")
        assert raised.value.field == "stop"
        assert int(await workers.run(b"pid()")) != os.getpid()

    run(test)


@pytest.mark.parametrize(
    "work", [b"spin()", b"'x' * 10**9", b"'x' * 10**18", b"crash()", b"1 / 0", b"(" * 3000]
)
def test_work_that_costs_too_much_ends_its_worker_and_nothing_else(work: bytes) -> None:
    async def test(workers: WorkerProcesses) -> None:
        for _ in range(4):  # more often than there are workers
            with pytest.raises(WorkLimitError, match=r"0\.5 s of processor time or 64 MiB"):
                await workers.run(work)
        assert await workers.run(b"1 + 1") == b"2"

    run(test)


def test_work_that_gets_no_processor_ends_and_is_not_to_blame() -> None:
    async def test(workers: WorkerProcesses) -> None:
        with pytest.raises(NodeUnavailableError, match=r"in 0\.3 s; try again"):
            await workers.run(b"sleep(60)")

    run(test, WorkLimits(cpu_s=5.0, wall_s=0.3, memory_bytes=2**26))


def test_the_start_of_a_template_does_not_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a tokenizer that took 20 s to load made the first request an invalid one."""
    monkeypatch.setattr("baton.processes.worker_processes._GRACE_S", 0.5)

    async def test() -> None:
        async with asyncio.timeout(60):
            assert await workers.run(b"1 + 1") == b"2"
            with pytest.raises(NodeUnavailableError):
                await workers.run(b"sleep(60)")

    limits = WorkLimits(cpu_s=0.3, wall_s=2.0, memory_bytes=2**26)
    workers = WorkerProcesses(WORK, {"load_s": "4"}, limits)
    try:
        asyncio.run(test())
    finally:
        workers.close()


def test_a_template_that_does_not_load_is_ended_and_nobody_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.processes.worker_processes._START_S", 0.5)

    async def test() -> None:
        async with asyncio.timeout(60):
            for _ in range(2):
                with pytest.raises(NodeUnavailableError, match=r"has not started in 0\.5 s"):
                    await workers.run(b"1")

    workers = WorkerProcesses(WORK, {"load_s": "60"}, LIMITS)
    try:
        asyncio.run(test())
    finally:
        workers.close()


def test_a_template_whose_work_cannot_be_loaded_is_nobodys_fault_but_ours() -> None:
    async def test() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(NodeUnavailableError):
                await workers.wait_ready()
            with pytest.raises(NodeUnavailableError):
                await workers.run(b"1")

    workers = WorkerProcesses(WORK, {"load_s": "no number"}, LIMITS)
    try:
        asyncio.run(test())
    finally:
        workers.close()


def test_a_want_of_descriptors_is_nobodys_fault_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    async def test(workers: WorkerProcesses) -> None:
        with monkeypatch.context() as want:
            want.setattr(socket, "socketpair", refuse)
            with pytest.raises(NodeUnavailableError, match="Too many open files; try again"):
                await workers.run(b"1")
        assert await workers.run(b"1") == b"1"
        with monkeypatch.context() as want:
            want.setattr(socket, "socketpair", refuse)
            for _ in range(4):
                with pytest.raises((WorkLimitError, NodeUnavailableError)):
                    await workers.run(b"spin()")
        for _ in range(4):
            assert await workers.run(b"1") == b"1"

    run(test)


def test_work_that_is_asked_for_while_others_wait_for_the_start_is_done() -> None:
    async def test(workers: WorkerProcesses) -> None:
        ready = asyncio.gather(*(workers.wait_ready() for _ in range(3)))
        assert await asyncio.gather(*(workers.run(b"1") for _ in range(3))) == [b"1"] * 3
        await ready

    run(test)


def test_a_worker_that_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.processes.worker_processes._GRACE_S", 0.5)

    async def test(workers: WorkerProcesses) -> None:
        sleeping = asyncio.create_task(workers.run(b"sleep(60)"))
        busy = await busy_worker()
        busy.send_signal(signal.SIGSTOP)  # its own alarm ends it only when it goes on
        with pytest.raises(NodeUnavailableError):
            await sleeping
        await until_gone(busy.pid)

    run(test, WorkLimits(cpu_s=5.0, wall_s=3.0, memory_bytes=2**26))


async def busy_worker() -> psutil.Process:
    """Return the worker that was asked: the last idle one."""
    while True:
        await asyncio.sleep(0.05)
        if (found := templates()) and len(workers := found[0].children()) == 3:
            await asyncio.sleep(0.1)
            return max(workers, key=lambda one: one.pid)


def test_work_of_one_caller_leaves_a_worker_for_the_others() -> None:
    async def test(workers: WorkerProcesses) -> None:
        hogs = [asyncio.create_task(workers.run(b"sleep(30)", caller="hog")) for _ in range(4)]
        await asyncio.sleep(0.1)
        for _ in range(3):
            assert await workers.run(b"1", caller="other") == b"1"
        with pytest.raises(OverloadedError, match="a caller may have 4, all together 8"):
            await asyncio.gather(*(workers.run(b"1", caller="hog") for _ in range(3)))
        assert await workers.run(b"1", caller="other") == b"1"
        for hog in hogs:
            hog.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
        assert await workers.run(b"1", caller="hog") == b"1"

    run(test)


def test_who_waits_gets_a_turn_in_order_of_callers() -> None:
    async def test(workers: WorkerProcesses) -> None:
        order: list[str] = []

        async def ask(caller: str, work: bytes) -> None:
            await workers.run(work, caller=caller)
            order.append(caller)

        await workers.run(b"1")
        first = [asyncio.create_task(ask("a", b"sleep(30)")) for _ in range(2)]
        await asyncio.sleep(0)
        late = [asyncio.create_task(ask("a", b"1")) for _ in range(3)]
        await ask("b", b"1")
        assert order == ["b"]
        first[0].cancel()
        await asyncio.gather(*late)
        assert order == ["b", "a", "a", "a"]
        first[1].cancel()
        await asyncio.gather(*first, return_exceptions=True)

    run(test, WorkLimits(cpu_s=0.5, wall_s=60.0, memory_bytes=2**26))


def test_cancelling_ends_the_work() -> None:
    async def test(workers: WorkerProcesses) -> None:
        task = asyncio.create_task(workers.run(b"sleep(30)"))
        busy = await busy_worker()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_gone(busy.pid)
        assert await workers.run(b"1") == b"1"

    run(test)


def test_a_worker_that_has_grown_makes_room_for_a_new_one() -> None:
    async def test(workers: WorkerProcesses) -> None:
        assert await workers.run(b"globals().update(kept='x' * 2**25)") == b"None"
        for _ in range(3):  # the idle one that was there last is asked again
            assert await workers.run(b"'kept' in globals()") == b"False"

    run(test)


def test_workers_that_ended_while_idle_are_blamed_on_nobody() -> None:
    async def test(workers: WorkerProcesses) -> None:
        await workers.run(b"'x'")
        (template,) = templates()
        idle = template.children()
        assert len(idle) == 3
        for worker in idle:
            worker.kill()
        while any(worker.status() != psutil.STATUS_ZOMBIE for worker in idle):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for _ in idle:
            assert await workers.run(b"'y'") == b"y"

    run(test)


def test_a_worker_that_ended_before_it_read_its_work_is_blamed_on_nobody() -> None:
    async def test(workers: WorkerProcesses) -> None:
        await workers.run(b"'x'")
        (template,) = templates()
        for worker in template.children():
            worker.suspend()
        asked = asyncio.create_task(workers.run(b"'y'"))
        await asyncio.sleep(0.1)  # it lies in a worker's socket by now
        for worker in template.children():
            worker.kill()
        assert await asked == b"y"

    run(test)


def test_a_template_that_ended_while_idle_is_started_again() -> None:
    async def test(workers: WorkerProcesses) -> None:
        await workers.run(b"1")
        [template] = templates()
        workers_of_it = [one.pid for one in template.children()]
        template.kill()
        await until_gone(*workers_of_it)
        assert await workers.run(b"1") == b"1"

    run(test)


def test_a_template_that_is_killed_under_120_pieces_of_work_costs_none_of_them() -> None:
    async def test(workers: WorkerProcesses) -> None:
        asked = [
            asyncio.create_task(workers.run(b"sleep(0.02) or %d" % number, caller=f"{number % 3}"))
            for number in range(120)
        ]
        for num_done in (10, 60):
            while sum(one.done() for one in asked) < num_done:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            [template] = templates()
            template.kill()
            while template in templates():  # noqa: ASYNC110  # until another template took its place
                await asyncio.sleep(0.005)
        answers = await asyncio.gather(*asked)
        assert answers == [b"%d" % number for number in range(120)]

    run(test, max_waiting=240)


def test_work_whose_template_is_killed_again_is_told_so() -> None:
    async def test(workers: WorkerProcesses) -> None:
        asked = asyncio.create_task(workers.run(b"sleep(30)"))
        for _ in range(3):
            await busy_worker()
            [template] = templates()
            template.kill()
            while template in templates():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(NodeUnavailableError, match="ended; try again"):
            await asked
        assert await workers.run(b"1") == b"1"

    run(test)


def test_nothing_outlives_a_program_that_is_killed() -> None:
    """Check that all processes end, even a worker that is computing."""
    program = (
        "import asyncio, sys\n"
        "from baton.processes.worker_processes import *\n"
        "limits = WorkLimits(cpu_s=99, wall_s=99, memory_bytes=2**26)\n"
        f"workers = WorkerProcesses({WORK!r}, {{}}, limits)\n"
        "async def main():\n"
        "    await workers.run(b'1')\n"
        "    print('up', flush=True)\n"
        "    await workers.run(b'spin()')\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
        time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 4
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_worker_needs_neither_torch_nor_grpc() -> None:
    async def test(workers: WorkerProcesses) -> None:
        loaded = await workers.run(
            b"__import__('baton.text.grammar_trials', fromlist='x')"
            b" and __import__('router.intake.texts', fromlist='x')"
            b" and [n for n in ('torch', 'grpc', 'aiohttp') if n in __import__('sys').modules]"
        )
        assert loaded == b"[]"

    run(test)
