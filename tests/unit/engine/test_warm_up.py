"""Unit tests of the warm-up: which steps are computed before the first request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import SHARE, StepPlan
from engine.engine import Engine
from engine.executors import uniproc
from engine.executors.uniproc import worker_of
from engine.make_engine import make_engine
from engine.worker import warm_up, worker
from engine.worker.kv_cache import allocate_kv_cache
from engine.worker.make_runner import LoadedModel
from engine.worker.model_runner import ModelRunner
from models.base import CausalLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

CPU = torch.device("cpu")


def load_demo(**options: Any) -> Engine:
    return make_engine(DEMO_MODEL, EngineConfig(device="cpu", max_num_requests=20, **options))


def model_of(engine: Engine) -> CausalLM:
    return worker_of(engine.executor).runner._model


def warm(engine: Engine, config: EngineConfig) -> None:
    spec = engine.kv_memory.spec
    warm_up.warm_up(LoadedModel(model_of(engine), spec, config, CPU, ("reference",)), 64)


def test_the_largest_step_is_computed_and_small_ones_of_all_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = load_demo(num_blocks=8)
    limits = EngineConfig(max_num_requests=20, max_num_batched_tokens=100)
    config = limits.for_device("cpu")
    steps: list[StepPlan] = []
    execute = ModelRunner.execute

    def noted(self: ModelRunner, step: StepPlan) -> ModelRunnerOutput:
        steps.append(step)
        return execute(self, step)

    monkeypatch.setattr(ModelRunner, "execute", noted)
    warm(engine, config)
    assert len(steps[0].token_ids) == 100
    small = [(step.num_requests, len(step.token_ids)) for step in steps[1:]]
    assert small == [(1, 2), (1, 1), (2, 4), (2, 2), (16, 32), (16, 16), (20, 40), (20, 20)]
    # The sampling kernel takes them, which those with logprobs it does not.
    for step in steps[1:]:
        assert all(new.sampling_params.logprobs is None for new in step.new_rows)
        for index in range(0, len(step.shares), SHARE):
            _, start, num_tokens, num_known = step.shares[index : index + SHARE]
            assert start + num_tokens == num_known
    assert not engine.kv_memory.tensor.any()


def test_a_largest_step_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_demo(num_blocks=8)

    def run_out(self: ModelRunner, step: StepPlan) -> ModelRunnerOutput:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "execute", run_out)
    with pytest.raises(ConfigError, match=r"^max_model_len: a step with a request of 64 tokens"):
        warm(engine, EngineConfig().for_device("cpu"))


@pytest.mark.parametrize("options", [{"num_blocks": 40}, {"kv_cache_bytes": 2**20}])
def test_a_gpu_is_warmed_up_when_its_memory_is_not_measured(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, warmed = torch.device("cuda", 0), []
    model = model_of(load_demo(num_blocks=8))
    for name, stand_in in {
        "load_model": lambda *_, **__: model,
        "choose_backends": lambda *_: ("reference",),
        "choose_packer": lambda *_: None,
        "allocate_kv_cache": lambda spec, num_blocks, device: allocate_kv_cache(
            spec, num_blocks, CPU
        ),
        "check_numbers": lambda *_: None,
        "warm_up": lambda *arguments: warmed.append(arguments),
    }.items():
        monkeypatch.setattr(worker, name, stand_in)
    monkeypatch.setattr(uniproc, "device_of_rank", lambda config, rank: gpu)
    engine = make_engine(DEMO_MODEL, EngineConfig(**options))  # type: ignore[arg-type]
    [(loaded, max_model_len)] = warmed
    assert (loaded.device, loaded.backends) == (gpu, ("reference",))
    assert max_model_len == engine.max_model_len
