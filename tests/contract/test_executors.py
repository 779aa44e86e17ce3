"""Contract of every executor: steps in order, calls of workers, and what a broken step does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from baton.api.errors import EngineDeadError
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from engine.core.step_plan import NewBlocks, NewRow, StepHooks, StepPlan
from engine.executors import EXECUTORS
from engine.executors.base import Executor
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

GREEDY = SamplingParams(temperature=0)


pytestmark = pytest.mark.medium

# Executor, ranks of a stage, stages, and whether steps are launched ahead.
HERE = [
    ("uniproc", 1, 1, False),
    ("uniproc", 1, 1, True),
    ("multiproc", 2, 1, False),
    ("multiproc", 2, 1, True),
    ("multiproc", 1, 2, True),
]
OF_LAUNCHERS = [
    ("external_launcher", 2, 1, False),
    ("external_launcher", 1, 2, True),
    ("ray", 2, 1, False),
    ("ray", 1, 2, True),
]
ALL = [*HERE, *(pytest.param(of, marks=pytest.mark.large) for of in OF_LAUNCHERS)]


def test_every_executor_is_in_this_suite() -> None:
    assert {name for name, *_ in (*HERE, *OF_LAUNCHERS)} == set(EXECUTORS.names())


def start(
    name: str, num_tensor_ranks: int, num_stages: int, ahead: bool, *, leads: bool = True
) -> Executor:
    if name == "ray":
        pytest.importorskip("ray")
    own_place = dict[str, str]()
    if name == "external_launcher" and leads:
        own_place = launch_other_rank(name, num_tensor_ranks, num_stages, ahead)
    config = EngineConfig(
        device="cpu",
        num_threads=1,
        kv_cache_bytes=2**22,
        async_scheduling=ahead,
        executor=name,
        tensor_parallel_size=num_tensor_ranks,
        pipeline_parallel_size=num_stages,
    )
    with mock.patch.dict(os.environ, own_place):
        return EXECUTORS.load(name)(DEMO_MODEL, config)


_launched: list[subprocess.Popen[bytes]] = []


@pytest.fixture(scope="module", autouse=True)
def launched_ranks_end() -> Iterator[None]:
    yield
    for process in _launched:
        process.wait(30)


def launch_other_rank(
    name: str, num_tensor_ranks: int, num_stages: int, ahead: bool
) -> dict[str, str]:
    """Start the one of two that does not lead, as a launcher would; it ends with the executor.

    Returns:
        What the launcher would say to the one that does.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    leader = num_stages - 1
    of = (name, num_tensor_ranks, num_stages, ahead)
    _launched.append(
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import start; start(*{of}, leads=False)"],
            env={**os.environ, **place, "RANK": str(1 - leader)},
            cwd=Path(__file__).parents[2],
        )
    )
    return {**place, "RANK": str(leader)}


@pytest.fixture(scope="module", params=ALL)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    executor = start(*request.param)
    yield executor
    executor.close()


def prompt(request_id: str, token_ids: list[int], row: int = 0) -> StepPlan:
    """A step that computes a prompt, and samples."""
    num_tokens = len(token_ids)
    new = NewRow(row, request_id, GREEDY, 0, num_tokens, frozenset(), [])
    blocks = NewBlocks(row, [1 + 2 * row, 2 + 2 * row])
    return StepPlan((new,), (blocks,), [row, 0, num_tokens, num_tokens], token_ids)


def test_a_row_goes_on_from_what_it_holds(executor: Executor) -> None:
    (first,) = executor.submit(prompt("a", [5, 6, 7]), StepHooks()).wait().sampled_token_ids["a"]
    behind = StepPlan((), (), [0, 3, 1, 4], [first])
    second = executor.submit(behind, StepHooks()).wait().sampled_token_ids["a"]
    whole = executor.submit(prompt("b", [5, 6, 7, first]), StepHooks()).wait()
    assert whole.sampled_token_ids == {"b": second}
    assert whole.ended_at >= whole.started_at > 0


def test_a_step_may_be_submitted_before_the_one_before_has_ended(executor: Executor) -> None:
    if not executor.runs_ahead or executor.config.pipeline_parallel_size > 1:
        return  # with stages, plans contain all tokens
    before = executor.submit(prompt("a", [5, 6, 7]), StepHooks())
    behind = executor.submit(StepPlan((), (), [0, 3, 1, 4], [-1]), StepHooks())
    (first,) = before.wait().sampled_token_ids["a"]
    whole = executor.submit(prompt("b", [5, 6, 7, first]), StepHooks()).wait()
    assert behind.wait().sampled_token_ids["a"] == whole.sampled_token_ids["b"]


def test_steps_of_different_requests_are_in_flight_together(executor: Executor) -> None:
    if not executor.runs_ahead:
        return
    prompts = {"a": [5, 6, 7], "b": [8, 9, 10, 11]}
    alone = {
        name: executor.submit(prompt(name, token_ids), StepHooks()).wait().sampled_token_ids[name]
        for name, token_ids in prompts.items()
    }
    plans = (prompt(name, prompts[name], row) for row, name in enumerate(prompts))
    submitted = [executor.submit(plan, StepHooks()) for plan in plans]
    found = [pending.wait().sampled_token_ids for pending in submitted]
    assert found == [{name: alone[name]} for name in prompts]


def test_tokens_behind_the_last_known_one_are_drafts_and_right_ones_count(
    executor: Executor,
) -> None:
    tokens = [5, 6, 7]
    for _ in range(4):
        found = executor.submit(prompt("a", tokens), StepHooks()).wait().sampled_token_ids["a"]
        tokens += found
    first, second, third, fourth = tokens[3:]
    wrong = next(token_id for token_id in range(10, 20) if token_id not in tokens)
    for drafts, expected in (
        ([second, third], (second, third, fourth)),
        ([second, wrong], (second, third)),
        ([wrong, third], (second,)),
    ):
        executor.submit(prompt("a", [5, 6, 7]), StepHooks()).wait()
        plan = StepPlan((), (), [0, 3, 3, 4], [first, *drafts])
        assert executor.submit(plan, StepHooks()).wait().sampled_token_ids == {"a": expected}


def test_a_hook_is_called_after_each_layer(executor: Executor) -> None:
    layers: list[int] = []
    executor.submit(prompt("a", [5, 6]), StepHooks(after_layer=layers.append)).wait()
    num_layers, num_stages = (
        executor.model_config.num_layers,
        executor.config.pipeline_parallel_size,
    )
    assert layers == list(range(num_layers - num_layers // num_stages, num_layers))


@pytest.mark.parametrize("of", ALL)
def test_what_a_hook_raises_is_raised_and_the_executor_has_failed(
    of: tuple[str, int, int, bool],
) -> None:
    executor = start(*of)

    def fail(layer: int) -> None:
        raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        executor.submit(prompt("a", [5, 6]), StepHooks(after_layer=fail)).wait()
    with pytest.raises(EngineDeadError, match="a kernel failed"):
        executor.check_health()
    executor.close()


def test_workers_are_called_and_are_well(executor: Executor) -> None:
    found = executor.collective_rpc("num_blocks", timeout_s=60)
    assert found == [executor.kv_memory.num_blocks] * executor.config.num_ranks
    executor.check_health()


@pytest.mark.parametrize("of", [HERE[0], HERE[2]])
def test_a_late_answer_is_an_error_and_the_executor_has_failed(
    of: tuple[str, int, int, bool],
) -> None:
    executor = start(*of)
    with pytest.raises(TimeoutError):
        executor.collective_rpc("num_blocks", timeout_s=0)
    with pytest.raises(EngineDeadError):
        executor.check_health()
    executor.close()


def test_a_closed_executor_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    executor = start("uniproc", 1, 1, True)
    executor.submit(prompt("a", [5, 6]), StepHooks()).wait()
    assert set(threading.enumerate()) > before
    executor.close()
    executor.close()
    assert set(threading.enumerate()) == before
