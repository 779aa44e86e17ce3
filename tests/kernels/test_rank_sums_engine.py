"""Ranks with own sums, in Triton's interpreter: one rank's tokens, and all end together."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")

from baton.api.errors import EngineDeadError
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from engine.core.step_plan import NewBlocks, NewRow, StepHooks, StepPlan
from engine.executors.base import Executor
from engine.executors.multiproc import MultiprocExecutor, RankProcess
from engine.executors.uniproc import UniprocExecutor
from models.parallel.mapped_group import MappedGroup
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = [pytest.mark.large, pytest.mark.timeout(600)]

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "kv_cache_bytes": 2**24,
}  # fmt: skip


def first_token(executor: Executor) -> Any:
    """Compute a prompt, and return the sampled token."""
    row = NewRow(0, "a", SamplingParams(temperature=0), 0, 3, frozenset(), [])
    plan = StepPlan((row,), (NewBlocks(0, [1]),), [0, 0, 3, 3], [5, 6, 7])
    return executor.submit(plan, StepHooks()).wait().sampled_token_ids


def test_ranks_with_own_sums_have_one_ranks_token_and_end_with_a_rank_that_is_killed() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the CPU's ranks need Triton's interpreter")
    one = UniprocExecutor(DEMO_MODEL, EngineConfig(**OPTIONS))
    config = EngineConfig(**OPTIONS, tensor_parallel_size=2, rank_sums="own")
    two = MultiprocExecutor(DEMO_MODEL, config)
    assert isinstance(two.worker._ranks.group, MappedGroup)
    assert first_token(two) == first_token(one)
    (other,) = two._others.ranks
    assert isinstance(other, RankProcess)
    other.process.kill()
    with pytest.raises(EngineDeadError, match="rank 1"):
        first_token(two)
    two.close()
    one.close()
