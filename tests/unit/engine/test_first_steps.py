"""Unit tests of the steps before a node joins: their thread, and their log lines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from baton.engine_config import EngineConfig
from baton.link.words import NodeBeat, NodeRole
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import PendingStep
from node_runtime.node_engine import LoadedEngine, load_engine
from node_runtime.threads import ENGINE_THREAD, ConnectorEnds, NodeThreads
from tests.fakes.checkpoints.demo_model import DEMO_MODEL


class NoNode:
    """A node without requests."""

    def step(self) -> bool:
        return False

    def beat(self) -> NodeBeat:
        return NodeBeat()


class NoEnd:
    """An end of a KV connector without peers."""

    def describe(self) -> bytes:
        return b""

    def close(self) -> None: ...


class Noted:
    """An engine that records which threads compute steps."""

    def __init__(self, loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[str] = set()
        self.error: Exception | None = None
        self._submit = loaded.engine.executor.submit
        monkeypatch.setattr(loaded.engine.executor, "submit", self.submit)

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return self._submit(plan, hooks)


@pytest.fixture
def loaded() -> LoadedEngine:
    # Chunks are much shorter than the longest prompt, so that a step behind a context is measured.
    config = EngineConfig(
        device="cpu", num_blocks=32, num_threads=1, long_prefill_token_threshold=100
    )
    return load_engine(str(DEMO_MODEL), config, node_name="d0", kv_connector="in_memory")


@pytest.fixture
def deaths() -> list[Exception]:
    return []


@pytest.fixture
def node(loaded: LoadedEngine, deaths: list[Exception]) -> Iterator[NodeThreads]:
    made = cast("Any", (NoNode(), ConnectorEnds(cast("Any", NoEnd()))))
    node = NodeThreads(
        "d0", NodeRole.DECODE, loaded, lambda wake: made, lambda event: None, deaths.append
    )
    yield node
    node.close()


@pytest.mark.medium
def test_first_steps_are_computed_by_the_thread_of_all_steps_and_told(
    node: NodeThreads, loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of kernels belong to the thread that calls the kernels."""
    noted = Noted(loaded, monkeypatch)
    assert node.registration("").step_times == ()
    node.compute_first_steps().result(60)
    assert noted.threads == {ENGINE_THREAD}
    registration = node.registration("")
    assert [one.num_tokens for one in registration.step_times][:2] == [1, 64]
    assert registration.decode_times
    assert registration.num_chunk_tokens >= registration.step_times[-1].num_tokens
    assert registration.context_step_times
    for one in registration.context_step_times:
        assert one.num_tokens == registration.step_times[-1].num_tokens
        assert one.num_context_tokens >= one.num_tokens


@pytest.mark.medium
def test_a_first_step_that_fails_ends_the_node_and_is_told_to_who_waits(
    node: NodeThreads,
    loaded: LoadedEngine,
    deaths: list[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Noted(loaded, monkeypatch)
    noted.error = RuntimeError("no kernel for this device")
    with pytest.raises(RuntimeError, match="no kernel"):
        node.compute_first_steps().result(60)
    node.close()
    assert deaths == [noted.error]
