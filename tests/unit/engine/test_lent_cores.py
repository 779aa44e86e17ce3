"""Unit tests of LentCores: which cores compute for which node, with real locks and threads."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from baton_kernels.dispatch import native_ops
from baton_kernels.huge_pages import huge_pages
from engine.make_engine import make_engine
from engine.worker.host.lent_cores import LentCores, lent_cores
from engine.worker.host.pages_ahead import PagesAhead
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

FIRST_CORE = str(min(os.sched_getaffinity(0)))
Placed = tuple[int, frozenset[int], int, frozenset[int]]


class FakeOps:
    """Notes where threads are placed: a test's machine may have one core."""

    def __init__(self, *, may_place: bool = True) -> None:
        self.placed: list[Placed] = []
        self.lenders: list[int] = []
        self.may_place = may_place

    def place_threads(self, *place: Any) -> bool:
        self.placed.append(cast("Placed", place))
        return self.may_place

    def watch_lenders(self, num_own_threads: int, lenders: Sequence[int]) -> None:
        """Check that every lender is idle when its cores are borrowed."""
        assert not any(ctypes.c_int8.from_address(address).value for address in lenders)
        self.lenders = list(lenders)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    os.sched_setaffinity(0, cores)  # an engine with a `cpu_list` changes them


def node(folder: Path, cores: str, ops: FakeOps | None = None) -> LentCores:
    torch.set_num_threads(1)  # which another node of this process may have changed
    return LentCores(folder, cores, cast("Any", ops or FakeOps()))


def test_a_node_computes_on_cores_of_one_that_rests_until_that_one_has_work(tmp_path: Path) -> None:
    ops = FakeOps()
    own, other = node(tmp_path, "0", ops), node(tmp_path, "2-3")
    own.borrow()
    assert torch.get_num_threads() == 3
    assert ops.placed == [(1, frozenset({0}), 2, frozenset({2, 3}))]
    other.borrow()  # and takes nothing: this one has work
    own.borrow()
    assert torch.get_num_threads() == 1
    other.rest()
    own.borrow()
    assert torch.get_num_threads() == 3


def test_cores_are_kept_while_a_thread_beside_the_steps_needs_them(tmp_path: Path) -> None:
    own, other = node(tmp_path, "0"), node(tmp_path, "1")
    own.borrow()
    assert torch.get_num_threads() == 2
    with other.keep(), other.keep():
        own.borrow()
        assert torch.get_num_threads() == 1
        other.borrow()
        torch.set_num_threads(1)
        other.rest()
        own.borrow()
        assert torch.get_num_threads() == 1
    own.borrow()
    assert torch.get_num_threads() == 2
    other.borrow()
    with other.keep():
        pass
    own.borrow()
    assert torch.get_num_threads() == 1, "its steps need them"


def test_who_rests_keeps_nothing_of_others(tmp_path: Path) -> None:
    own, _ = node(tmp_path, "0"), node(tmp_path, "1")
    third = node(tmp_path, "2")
    own.borrow()
    assert torch.get_num_threads() == 3
    own.rest()
    assert torch.get_num_threads() == 1
    third.borrow()
    assert torch.get_num_threads() == 3


def test_cores_are_lent_to_one_at_a_time(tmp_path: Path) -> None:
    first, second, _ = node(tmp_path, "0"), node(tmp_path, "1"), node(tmp_path, "2")
    first.borrow()
    assert torch.get_num_threads() == 3
    second.borrow()
    torch.set_num_threads(1)
    first.borrow()  # gives back those of the second, and keeps the third's
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    second.borrow()
    assert torch.get_num_threads() == 1


def test_cores_come_and_go_between_layers(tmp_path: Path) -> None:
    own, other = node(tmp_path, "0"), node(tmp_path, "1")
    layers: list[int] = []
    after_layer = own.between_layers(layers.append)
    own.borrow()
    other.borrow()
    after_layer(0)
    assert torch.get_num_threads() == 1
    other.rest()
    after_layer(1)
    own.between_layers(None)(2)
    assert torch.get_num_threads() == 2
    assert layers == [0, 1]


def test_a_borrower_sees_at_once_that_the_owner_computes(tmp_path: Path) -> None:
    ops = FakeOps()
    own, other = node(tmp_path, "0", ops), node(tmp_path, "1")
    own.borrow()
    (address,) = ops.lenders
    assert not ctypes.c_int8.from_address(address).value
    other.borrow()
    assert ctypes.c_int8.from_address(address).value
    own.borrow()
    assert ops.lenders == []


def test_an_owner_waits_for_the_part_of_a_step_that_a_borrower_computes(tmp_path: Path) -> None:
    ops = FakeOps()
    own, other = node(tmp_path, "0", ops), node(tmp_path, "1")
    own.borrow()
    used = ctypes.c_int8.from_address(ops.lenders[0] + 1)
    used.value = 1
    began_at = time.monotonic()
    other.borrow()  # has waited as long as it may
    assert time.monotonic() - began_at >= 0.02
    assert used.value
    other.rest()
    own.rest()
    other.borrow()  # nobody has borrowed the cores: the borrower died
    assert not used.value


@pytest.mark.medium
def test_what_a_process_held_that_was_killed_is_lent(tmp_path: Path) -> None:
    own = node(tmp_path, "0")
    read, write = os.pipe()
    child = os.fork()
    if not child:  # no test runs here
        try:
            dying = node(tmp_path, "1")
            dying.borrow()
            os.write(write, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.read(read, 1)
    own.borrow()
    assert torch.get_num_threads() == 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    own.borrow()
    assert torch.get_num_threads() == 2


def test_a_node_that_closes_lends_for_good(tmp_path: Path) -> None:
    own, other = node(tmp_path, "0"), node(tmp_path, "1")
    other.borrow()
    other.close()
    own.borrow()
    assert torch.get_num_threads() == 2


def test_a_node_that_may_not_run_on_lent_cores_leaves_them_to_others(tmp_path: Path) -> None:
    own, _ = node(tmp_path, "0", FakeOps(may_place=False)), node(tmp_path, "1")
    third = node(tmp_path, "2")
    own.borrow()
    own.borrow()
    assert torch.get_num_threads() == 1
    third.borrow()
    assert torch.get_num_threads() == 2


def test_what_is_no_nodes_cores_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "something.busy").touch()
    own, _ = node(tmp_path, "0-1"), node(tmp_path, "1-2")
    torch.set_num_threads(1)
    own.borrow()
    assert torch.get_num_threads() == 1


def test_a_node_sees_whether_another_one_computes_on_its_cores(tmp_path: Path) -> None:
    own, other = node(tmp_path, "0"), node(tmp_path, "1")
    assert not own.are_taken()
    other.borrow()
    assert own.are_taken()
    other.rest()
    assert not own.are_taken()


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
def test_memory_is_found_ahead_only_while_no_other_node_uses_the_cores(tmp_path: Path) -> None:
    if not PagesAhead(huge_pages(2**22).view(2, -1)).find(0):
        pytest.skip("a kernel without MADV_POPULATE_WRITE")
    config = EngineConfig(core_locks=str(tmp_path), cpu_list=FIRST_CORE, kv_cache_bytes=2**26)
    engine, other = make_engine(DEMO_MODEL, config), node(tmp_path, "4000")
    assert engine.do_idle_work()
    other.borrow()
    assert not engine.do_idle_work()
    other.rest()
    assert engine.do_idle_work()
    engine.close()


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    config = EngineConfig(core_locks=str(tmp_path / "nowhere"), cpu_list="0")
    with pytest.raises(ConfigError, match=r"core_locks: cannot write to .*nowhere"):
        lent_cores(config)


def test_lending_needs_to_know_which_cores_are_the_nodes_own() -> None:
    with pytest.raises(ConfigError, match="core_locks: cpu_list must say"):
        EngineConfig(core_locks="somewhere")


PLACES = """
import ctypes, os, torch
from pathlib import Path
from baton_kernels.dispatch import native_ops
from baton_kernels.huge_pages import huge_pages
first, second = sorted(os.sched_getaffinity(0))[:2]
ops = native_ops()
assert ops.place_threads(1, frozenset({first}), 1, frozenset({second}))
places = [os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()]
assert {first} in places and {second} in places, places
assert os.sched_getaffinity(0) == {first}
def borrows() -> bool:
    # A second thread cannot be placed on a core that is not there, and fails if it computes.
    return not ops.place_threads(1, frozenset({first}), 1, frozenset({4000}))
assert borrows()
idle, lender = (ctypes.c_int8 * 2)(0, 0), (ctypes.c_int8 * 2)(0, 0)
ops.watch_lenders(1, [ctypes.addressof(idle), ctypes.addressof(lender)])
assert borrows()
lender[0] = 1
assert not borrows()
lender[0] = 0
assert borrows()
assert not idle[1] and not lender[1]  # no longer used
lender[0] = 1
ops.watch_lenders(1, [])
assert borrows()
"""


@pytest.mark.medium
@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_run_where_they_are_placed_until_a_lender_is_busy() -> None:
    subprocess.run([sys.executable, "-c", PLACES], check=True)
