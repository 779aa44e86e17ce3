"""AdapterQueue: commands wait for their adapters, in order, and never run without them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from baton.adapters.digest import AdapterMissingError
from baton.adapters.files import Adapter, AdapterFiles, adapter_digest
from baton.api.sampling_params import SamplingParams
from baton.link.words import AbortAll, PrefillCommand, node_request_id
from engine.adapters import AdapterTable
from engine.engine import Engine
from engine.executors.base import Executor
from node_runtime.adapters.adapter_queue import (
    LOAD_TIMEOUT_S,
    NICENESS,
    PATIENCE_S,
    AdapterQueue,
    Failure,
)
from tests.fakes.adapter_files import pair, write_adapter
from tests.fakes.time.virtual_clock import VirtualClock


class Worker:
    """Accepts every adapter; reads wait while ``may_read`` is clear."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.num_reads, self.niceness = 0, 0

    def check_adapter(self, files: AdapterFiles) -> None:
        self.num_reads += 1
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert self.may_read.wait(10)

    def pack_adapter(self, adapter: Adapter) -> int:
        return 100

    def keep_cores(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        return [100]


class FakeEngine:
    """An engine of adapters alone."""

    def __init__(self, slots: int) -> None:
        self.worker, self.in_use = Worker(), set[str]()
        executor = cast("Executor", self.worker)
        self.adapters = AdapterTable(executor, slots, 10**6, lambda: self.in_use)


class Scene:
    """A queue over ``slots``; jobs that start use their adapters until `end`."""

    def __init__(self, root: Path, slots: int = 1, *, gives_way: bool = False) -> None:
        self.root = root
        self.engine, self.clock, self.woken = FakeEngine(slots), VirtualClock(), threading.Event()
        engine = cast("Engine", self.engine)
        self.queue = AdapterQueue(engine, root, self.woken.set, self.clock, gives_way=gives_way)
        self.started: list[str] = []
        self.failures: list[Failure] = []
        self.digests = {
            name: adapter_digest(write_adapter(root / name, pair(seed=10 * seed)))
            for seed, name in enumerate("abc")
        }

    def command(self, request_id: str, adapter: str, **fields: Any) -> PrefillCommand:
        usual: dict[str, Any] = {
            "request_id": request_id, "epoch": 1, "prompt_token_ids": [1], "timeout_s": 1000.0,
            "sampling_params": SamplingParams(), "decode_engine_id": "", "adapter_source": adapter,
            "adapter": self.digests.get(adapter, adapter),
        }  # fmt: skip
        return PrefillCommand(**usual | fields)

    def load(self, adapter: str, *, pinned: bool) -> None:
        """Give an adapter a slot, as an operator does."""
        table = self.engine.adapters
        table.load(table.read(self.root / adapter), pinned=pinned)

    def ask(self, request_id: str, adapter: str, **fields: Any) -> None:
        """Let a command come, and start it if it may."""
        command = self.command(request_id, adapter, **fields)
        if self.queue.admit(command, self.clock()):
            self._start(command)

    def _start(self, command: Any) -> None:
        self.engine.adapters.acquire(command.adapter)
        self.engine.in_use.add(command.adapter)
        self.started.append(command.request_id)

    def turn(self) -> None:
        """Run one round of the node."""
        for item in self.queue.take_ready():
            if isinstance(item, Failure):
                self.failures.append(item)
            else:
                self._start(item[1])

    def turn_until(self, *started: str) -> None:
        """Run rounds until these requests have started."""
        give_up_at = time.monotonic() + 10
        while self.started != list(started):
            assert time.monotonic() < give_up_at, (self.started, self.failures)
            self.turn()
            time.sleep(0.001)

    def end(self, adapter: str) -> None:
        """End the jobs of an adapter."""
        self.engine.in_use.discard(self.digests[adapter])


def test_a_command_waits_for_its_adapter_and_others_do_not(tmp_path: Path) -> None:
    scene = Scene(tmp_path, slots=2)
    scene.engine.worker.may_read.clear()
    scene.ask("1", "a")
    scene.ask("2", "a")
    scene.ask("3", "")
    scene.turn()
    assert (scene.started, scene.queue.num_waiting) == (["3"], 2)
    scene.engine.worker.may_read.set()
    assert scene.woken.wait(10)
    scene.turn_until("3", "1", "2")
    assert scene.engine.worker.num_reads == 1, "one load serves all"
    assert scene.queue.load_s >= 0
    scene.ask("4", "a")
    assert scene.started[-1] == "4"
    scene.ask("5", "b")
    scene.turn_until("3", "1", "2", "4", "5")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 9 bytes")])
def test_an_adapter_that_does_not_fit_in_memory_fails_its_commands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    scene = Scene(tmp_path)

    def pack(adapter: Adapter) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(scene.engine.worker, "pack_adapter", pack)
        scene.ask("1", "a")
        scene.turn()
        assert scene.woken.wait(10)
        scene.turn()
    (failure,) = scene.failures
    assert failure.problem == "adapter: 'a': does not fit in this machine's memory"
    scene.ask("2", "b")
    scene.turn_until("2")


def test_adapters_take_each_others_slots_in_order(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for request_id, adapter in (("x", "b"), ("y", "c"), ("1", "a")):  # so that all are read
        scene.ask(request_id, adapter)
        scene.turn_until(*scene.started, request_id)
        scene.end(adapter)
    scene.engine.in_use.add(scene.digests["a"])
    scene.ask("2", "b")
    scene.ask("3", "c")
    scene.turn()
    assert scene.started == ["x", "y", "1"], "its slot is in use"
    scene.ask("4", "a")
    assert scene.started == ["x", "y", "1", "4"], "it has its slot"
    scene.clock.advance(PATIENCE_S + 0.1)
    scene.ask("5", "a")
    assert scene.started == ["x", "y", "1", "4"], "others have waited long enough"
    for adapter, request_id in (("a", "2"), ("b", "3"), ("c", "5")):
        scene.turn()
        assert scene.started[-1] != request_id
        scene.end(adapter)
        scene.turn()
        assert scene.started[-1] == request_id
    assert scene.engine.worker.num_reads == 3


@pytest.mark.skipif(sys.platform != "linux", reason="threads share a priority elsewhere")
def test_reading_gives_way_to_steps_where_asked(tmp_path: Path) -> None:
    found: list[int] = []
    for gives_way in (False, True):
        scene = Scene(tmp_path, gives_way=gives_way)
        scene.ask("1", "a")
        scene.turn_until("1")
        found.append(scene.engine.worker.niceness)
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert found == [usual, min(usual + NICENESS, 19)]


def test_what_cannot_be_loaded_fails_and_nothing_else(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with pytest.raises(AdapterMissingError, match=r"not loaded here, and its folder is not known"):
        scene.ask("1", "a", adapter_source="")
    scene.ask("2", "a", adapter_source="b")
    scene.ask("3", "a", adapter_source="b")
    scene.ask("4", "c", adapter_source="../c")
    scene.ask("5", "b")
    scene.turn_until("5")
    problems = {one.command.request_id: one.problem for one in scene.failures}
    assert problems["2"] == problems["3"]
    assert f"has the digest {scene.digests['b']}, not {scene.digests['a']}" in problems["2"]
    assert "must be a path below" in problems["4"]
    none = AdapterQueue(cast("Engine", FakeEngine(0)))
    with pytest.raises(AdapterMissingError, match=r"and this node loads no adapters$"):
        none.admit(scene.command("6", "a"), 0.0)


def test_no_command_waits_for_a_slot_of_a_pinned_adapter(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.load("a", pinned=True)
    scene.ask("1", "b")
    scene.ask("2", "a")
    scene.turn()
    assert scene.started == ["2"]
    (failure,) = scene.failures
    assert failure.problem.endswith("all slots of this node have pinned adapters")
    scene.load("a", pinned=False)
    scene.end("a")
    scene.ask("3", "b")
    scene.turn_until("2", "3")


def test_waits_end_by_cancel_abort_deadline_and_in_any_case(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engine.worker.may_read.clear()
    scene.ask("1", "a")
    scene.ask("1", "a", epoch=2)  # a later attempt takes the place of the earlier one
    scene.ask("2", "a")
    scene.ask(node_request_id("3", "r"), "a")
    scene.ask("4", "a", timeout_s=5.0)
    scene.ask("5", "a")
    assert scene.queue.num_waiting == 5
    scene.queue.cancel("1", 1)
    scene.queue.cancel("2", 1)
    scene.queue.abort(AbortAll("", "r"))
    assert scene.queue.num_waiting == 3
    scene.clock.advance(5.1)
    scene.turn()
    assert [(one.command.request_id, one.is_late) for one in scene.failures] == [("4", True)]
    scene.clock.advance(LOAD_TIMEOUT_S)
    scene.turn()
    assert [one.command.request_id for one in scene.failures] == ["4", "1", "5"]
    assert scene.failures[-1].problem.endswith("within 45 s: its files are being read")
    assert scene.queue.num_waiting == 0
    scene.engine.worker.may_read.set()
    scene.turn()
    assert scene.started == []
