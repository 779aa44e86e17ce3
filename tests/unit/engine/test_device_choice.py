"""Unit tests of where an engine computes, on machines without a GPU: torch.cuda is stood in for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import baton_kernels
from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from baton.kv.layers import LayerKV, PagedKV
from baton_kernels import reference
from baton_kernels.quantized import QuantizedFormat
from engine import LLM
from engine.core.kv_cache_groups import KVCacheGroup
from engine.core.request import Request
from engine.executors.uniproc import worker_of
from engine.make_engine import make_engine
from engine.sampling.step_sampler import LaunchedStep
from engine.worker.device_choice import (
    check_batch_invariant,
    choose_backends,
    choose_dtype,
    choose_packer,
    describe_weights,
)
from engine.worker.kv_cache import KVCacheSpec
from engine.worker.model_runner import ModelRunner
from models import load_model
from models.config import ModelConfig
from models.gpu.invariant import InvariantPacker
from models.gpu.packing import GpuPacker
from models.layers.computing import Computing
from models.recipe import AttentionSpec, LatentSpec, LayerSpec, MixerSpec, ShortConvSpec
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

LATENTS = LatentSpec(
    num_heads=4, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, rope_interleave=True, scale=1.0,
)  # fmt: skip
STATES = ShortConvSpec(num_channels=256, kernel_size=3, bias=False)
LARGE_HEADS = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=512, window=None)
CPU, SECOND_GPU = torch.device("cpu"), torch.device("cuda", 1)


class Threads:
    """The current device of every thread: 0 until it is set."""

    def __init__(self) -> None:
        self._local = threading.local()

    def set_device(self, device: torch.device) -> None:
        self._local.index = device.index

    @property
    def current(self) -> int:
        return getattr(self._local, "index", 0)


@pytest.mark.medium
@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_are_launched_on_the_engines_device_whichever_thread_runs_them(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineConfig(device="cpu", kv_cache_bytes=2**22, async_scheduling=asynchronous)
    engine = make_engine(DEMO_MODEL, options)
    worker_of(engine.executor).device = SECOND_GPU
    threads, launched_on = Threads(), []
    monkeypatch.setattr(torch.cuda, "set_device", threads.set_device)
    launch: Callable[..., LaunchedStep] = ModelRunner.launch

    def noted(self: ModelRunner, *arguments: object) -> LaunchedStep:
        launched_on.append(threads.current)
        return launch(self, *arguments)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    engine.add_request(
        Request.create("a", [5] * 9, params, seed=0, eos_token_ids=frozenset(), max_model_len=99)
    )

    def run() -> None:
        while engine.has_work:
            engine.step()

    thread = threading.Thread(target=run)  # not the one that loaded the model
    thread.start()
    thread.join()
    assert launched_on == [1, 1, 1]
    assert threads.current == 0  # of this thread nothing was changed


@pytest.mark.parametrize(
    ("name", "device", "has_bfloat16", "checkpoint", "expected", "is_said"),
    [
        ("auto", SECOND_GPU, False, "float32", torch.bfloat16, True),
        ("auto", SECOND_GPU, False, "float16", torch.float16, False),
        ("auto", SECOND_GPU, False, "bfloat16", torch.bfloat16, False),
        ("float32", SECOND_GPU, False, "float32", torch.float32, False),
        ("auto", CPU, False, "bfloat16", torch.float32, False),
        ("auto", CPU, True, "bfloat16", torch.bfloat16, False),
        ("auto", CPU, True, "float16", torch.float32, False),
        ("auto", CPU, True, "float32", torch.float32, False),
        ("float32", CPU, True, "bfloat16", torch.float32, False),
    ],
)
def test_auto_computes_in_16_bits_where_the_device_does(
    name: str,
    device: torch.device,
    has_bfloat16: bool,
    checkpoint: str,
    expected: torch.dtype,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "engine.worker.device_choice")
    model = ModelConfig.from_folder(DEMO_MODEL)
    object.__setattr__(model, "compute_dtype", checkpoint)
    assert choose_dtype(name, device, model, has_bfloat16) is expected
    assert ("bfloat16 for a float32 checkpoint" in caplog.text) is is_said


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, "cpu", (64, 1024, 512)),
        ({}, "cuda", (256, 8192, 4096)),
        ({"max_num_requests": 32}, "cuda", (32, 8192, 4096)),
        ({"max_num_requests": 10_000}, "cuda", (10_000, 10_000, 4096)),
        ({"max_num_batched_tokens": 48}, "cpu", (48, 48, 512)),
        ({"long_prefill_token_threshold": 100}, "cuda", (256, 8192, 100)),
    ],
)
def test_limits_of_a_batch_are_the_devices_unless_they_are_given(
    options: dict[str, int], device: str, expected: tuple[int, int, int]
) -> None:
    config = EngineConfig(**options).for_device(device)  # type: ignore[arg-type]
    found = (config.max_num_requests, config.max_num_batched_tokens)
    assert (*found, config.long_prefill_token_threshold) == expected


@pytest.mark.parametrize(
    "name", ["max_num_requests", "max_num_batched_tokens", "long_prefill_token_threshold"]
)
def test_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be 0 or more, got -1"):
        EngineConfig(**{name: -1})  # type: ignore[arg-type]


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens: must be at least max_num_req"):
        EngineConfig(max_num_requests=65, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("weights", "dtype", "capability", "becomes"),
    [
        ("auto", torch.bfloat16, (9, 0), (None, True)),
        ("auto", torch.float16, (8, 0), (None, False)),
        ("int4", torch.bfloat16, (8, 0), (QuantizedFormat.INT4, False)),
        ("int8", torch.bfloat16, (9, 0), (QuantizedFormat.INT8, True)),
        ("fp8", torch.bfloat16, (8, 9), (QuantizedFormat.FP8, True)),
        ("bf16", torch.bfloat16, (9, 0), None),
    ],
)
def test_how_a_gpu_keeps_weights(
    weights: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    becomes: tuple[QuantizedFormat | None, bool] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    packer = choose_packer(EngineConfig(weights=weights), SECOND_GPU, dtype)
    assert (packer is None) == (becomes is None)
    if becomes is not None:
        assert isinstance(packer, GpuPacker)
        assert (packer.weights, packer.has_float8) == becomes


@pytest.mark.parametrize(
    ("weights", "capability", "problem"),
    [
        ("fp8", (8, 0), "compute capability 8.9, got 8.0"),
        ("fp16", (9, 0), "requires the matching --dtype, got bfloat16"),
    ],
)
def test_weights_that_a_device_cannot_keep_are_refused(
    weights: str,
    capability: tuple[int, int],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(ConfigError, match=problem):
        choose_packer(EngineConfig(weights=weights), SECOND_GPU, torch.bfloat16)


def test_without_triton_a_gpu_has_no_weights_of_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.device_choice.find_spec", lambda _: None)
    assert choose_packer(EngineConfig(), SECOND_GPU, torch.bfloat16) is None
    with pytest.raises(ConfigError, match="weights: int4 on a GPU needs Triton"):
        choose_packer(EngineConfig(weights="int4"), SECOND_GPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "device", "mixer", "problem"),
    [
        ({"native_kernels": False}, "cpu", None, "on a CPU it needs native kernels"),
        (
            {"tensor_parallel_size": 2},
            "cuda",
            None,
            "on GPUs tensor_parallel_size must be 1, got 2",
        ),
        ({"weights": "int4"}, "cuda", None, "on a GPU weights cannot be int4; int8 they can"),
        ({}, "cuda", LATENTS, r"on a GPU not for models with latents \(MLA\)"),
        ({}, "cuda", STATES, "on a GPU not for models with states"),
        ({}, "cuda", LARGE_HEADS, "on a GPU heads must have at most 256 numbers"),
        ({}, "cuda", None, "on a GPU compute capability must be 8.x, 9.x or 12.x, got 10.0"),
        ({"weights": "int8"}, "cuda", None, None),
        ({}, "cuda", None, None),
    ],
)
def test_where_results_can_have_no_company(
    options: dict[str, Any],
    device: str,
    mixer: MixerSpec | None,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    capability = (10, 0) if problem is not None and "compute" in problem else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    described = ModelConfig.from_folder(DEMO_MODEL)
    if mixer is not None:
        layers = (*described.layers[1:], LayerSpec(mixer, None))
        described = replace(described, recipe=replace(described.recipe, layers=layers))
    asked = EngineConfig(batch_invariant=True, **options)
    check_batch_invariant(EngineConfig(**options), torch.device(device), described)
    if problem is None:
        check_batch_invariant(asked, torch.device(device), described)
    else:
        with pytest.raises(ConfigError, match=f"^batch_invariant: {problem}$"):
            check_batch_invariant(asked, torch.device(device), described)


def test_layers_with_heads_too_large_for_triton_have_another_backend() -> None:
    pytest.importorskip("triton")
    kept: tuple[LayerKV, ...] = (PagedKV(2, 64), PagedKV(2, 576), STATES.kv)
    groups = tuple(KVCacheGroup(kv, (index,)) for index, kv in enumerate(kept))
    spec = KVCacheSpec(groups, 16, torch.float32, torch.float32)
    model = ModelConfig.from_folder(DEMO_MODEL)
    found = choose_backends(spec, EngineConfig(), SECOND_GPU, model)
    assert found == ("triton", "reference", None)
    asked = EngineConfig(attention_backend="triton")
    with pytest.raises(ConfigError, match="triton takes heads of at most 512 numbers, got 576"):
        choose_backends(spec, asked, SECOND_GPU, model)


def test_layers_of_integers_are_kept_where_results_have_no_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    plain = choose_packer(EngineConfig(batch_invariant=True), SECOND_GPU, torch.bfloat16)
    assert plain == InvariantPacker("9.0")
    packer = choose_packer(
        EngineConfig(batch_invariant=True, weights="int8"), SECOND_GPU, torch.bfloat16
    )
    int8 = GpuPacker(SECOND_GPU, QuantizedFormat.INT8, has_float8=True)
    assert packer == InvariantPacker("9.0", int8)


def test_nodes_whose_results_have_company_or_that_add_otherwise_make_no_pair() -> None:
    model = load_model(DEMO_MODEL)
    packers = (None, InvariantPacker("8.0"), InvariantPacker("9.0"))
    said = [describe_weights("auto", packer, model) for packer in packers]
    assert said[0] == "auto"
    assert said[1] == "auto on a GPU: batch-invariant on 8.0"
    assert len(set(said)) == 3


def test_an_engine_without_native_kernels_computes_its_layers_in_torch() -> None:
    with_kernels, without = (
        worker_of(LLM(str(DEMO_MODEL), native_kernels=native).engine.executor)
        for native in (True, False)
    )
    ops = {
        module.ops
        for module in without.runner._model.modules()  # type: ignore[attr-defined]
        if isinstance(module, Computing)
    }
    assert ops == {reference}
    norm = with_kernels.runner._model.model.norm  # type: ignore[attr-defined]
    assert norm.ops is baton_kernels


def test_drafts_that_change_tokens_are_refused_where_company_may_not_matter() -> None:
    with pytest.raises(ConfigError, match=r"^draft_acceptance: batch_invariant wants equality"):
        EngineConfig(batch_invariant=True, draft_acceptance="rejection")
