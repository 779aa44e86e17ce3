"""Threads that must not fail go on without their helpers when no descriptor is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from baton.api.errors import TransferError
from engine.worker.host.lent_cores import LentCores
from engine.worker.host.pages_ahead import PagesAhead
from kvconnector.transports.sockets.identity import MAX_FORGOTTEN, PinnedIdentity
from kvconnector.transports.sockets.outgoing import MAX_BACK_OFF_S, REPORT_S
from router.gate.resources import _share_of_descriptors
from tests.fakes.handoff.tls_ends import End, rounds_until
from tests.fakes.network.no_descriptors import no_descriptors

pytestmark = pytest.mark.medium


class NoOps:
    """Places no thread."""

    def place_threads(self, *place: Any) -> bool:
        return True

    def watch_lenders(self, *lenders: Any) -> None:
        pass


@pytest.fixture
def cores(tmp_path: Path) -> LentCores:
    return LentCores(tmp_path, "0", cast("Any", NoOps()))


def test_the_fake_is_real() -> None:
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        Path("/proc/self/stat").read_text(encoding="ascii")


def test_a_node_that_cannot_look_for_lent_cores_computes_on_its_own(
    cores: LentCores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "2-3.busy").touch()
    with no_descriptors():
        for _ in range(3):
            cores.borrow()
            cores.rest()
    assert caplog.text.count("cannot look for nodes that lend cores") == 1
    cores.borrow()  # finds the nodes once descriptors are free
    assert cores._borrowed
    cores.close()


def test_pages_are_found_ahead_or_not_and_nothing_is_raised() -> None:
    pages = PagesAhead(torch.zeros(64, 2**16))
    with no_descriptors():
        pages.find(0)


def test_a_tls_transport_waits_until_it_can_dial() -> None:
    p, d = End("p"), End("d")
    p.transport.connect(d.info)
    d.transport.connect(p.info)
    with no_descriptors():
        p.transport.notify(d.id, b"hello")  # the message waits for a connection
        p.clock.advance(REPORT_S)
        p.round()
        with pytest.raises(TransferError, match="too many open files"):
            p.transport.notify(d.id, b"again")
    p.clock.advance(MAX_BACK_OFF_S)
    rounds_until((p, d), lambda: b"hello" in d.heard, "the message")
    for end in (p, d):
        end.transport.close()


def test_tls_contexts_stay_when_no_new_ones_can_be_made(caplog: pytest.LogCaptureFixture) -> None:
    identity = PinnedIdentity()
    before = identity.context(is_server=True)
    with no_descriptors():
        for number in range(2 * MAX_FORGOTTEN + 2):
            identity.forget(b"%d" % number)
    assert "are kept" in caplog.text
    assert identity.context(is_server=True) is before


def test_a_router_that_cannot_count_its_descriptors_has_none_left() -> None:
    assert 0 < _share_of_descriptors(2**20) < 1
    with no_descriptors():
        # If the kernel gives the number as the folder's size, counting needs no descriptor.
        assert _share_of_descriptors(2**20) > 0


END = """
import {imports}
from baton.processes.process import end_within
end_within(0.3)
end_within(60)  # does not make it longer
{hang}
"""


@pytest.mark.parametrize(
    ("imports", "hang"),
    [
        ("time", "time.sleep(60)"),
        ("ctypes", "ctypes.PyDLL(None).sleep(60)"),  # with the interpreter's lock
        ("atexit, time", "atexit.register(time.sleep, 60)"),
        ("threading, time", "threading.Thread(target=time.sleep, args=(60,)).start()"),
    ],
)
def test_a_process_that_is_told_to_end_ends_wherever_it_hangs(imports: str, hang: str) -> None:
    program = END.format(imports=imports, hang=hang)
    done = subprocess.run([sys.executable, "-c", program], timeout=30, check=False)
    assert done.returncode == -14


DEAD = """
import threading, time
from baton.api.errors import EngineDeadError
from baton.processes.process import run_program

async def main():
    import asyncio
    threading.Thread(target=time.sleep, args=(60,)).start()
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    raise EngineDeadError("out of luck")

run_program(main)
"""


WITHOUT_THREADS = """
import asyncio, sys, time
sys.path.insert(0, {folder!r})
import sitecustomize
from baton.processes.process import run_program

async def main():
    sitecustomize.take_threads()
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(4)))
    print("done", flush=True)

run_program(main)
"""


def test_a_program_needs_no_further_thread_once_it_runs() -> None:
    folder = str(Path(__file__).parents[1] / "fakes" / "processes" / "troubled_process")
    command = [sys.executable, "-c", WITHOUT_THREADS.format(folder=folder)]
    done = subprocess.run(command, timeout=30, check=False, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_a_program_whose_engine_is_dead_waits_for_no_thread() -> None:
    command = [sys.executable, "-c", DEAD]
    done = subprocess.run(command, timeout=30, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: out of luck\n")
