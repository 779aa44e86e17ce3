"""Tests that batch-invariant kernels in an engine give a request equal bits in any batch.

On a GPU with ``batch_invariant``; without one the same layers and kernels in Triton's interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import baton_kernels
from baton.api.sampling_params import SamplingParams
from baton_kernels.dispatch import _triton_ops
from baton_kernels.triton.invariant import attention
from engine import LLM
from engine.executors.uniproc import worker_of
from engine.worker import worker
from models.gpu.invariant import InvariantPacker
from models.layers.linear import InvariantLinear
from models.layers.moe import SparseMoe
from tests.kernels.conftest import DEVICE
from tests.kernels.test_invariant import short_parts as short_parts
from tests.kernels.test_invariant import sums_without_order
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.large

MODELS = {
    "a tied head": ("Qwen3ForCausalLM", None),
    "sliding window": ("MistralForCausalLM", 40),
    "experts": ("MixtralForCausalLM", None),
}
VOCABULARY, MAX_MODEL_LEN = 61, 96


@pytest.fixture
def kernels_anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a GPU: its kernels on the CPU, interpreted."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(baton_kernels, "ops_for", lambda _: _triton_ops())
        monkeypatch.setattr(worker, "choose_packer", lambda *_: InvariantPacker("interpreter"))
    monkeypatch.setattr(attention, "LEAST_PART", 16 if DEVICE.type == "cpu" else 64)
    with sums_without_order():
        yield


def load(folder: Path, **options: Any) -> LLM:
    mode: dict[str, Any] = {"batch_invariant": True}
    if DEVICE.type == "cpu":
        mode = {"attention_backend": "triton_invariant"}
    shape = {"block_size": 16, "max_model_len": MAX_MODEL_LEN, "dtype": "float32"}
    return LLM(str(folder), device=str(DEVICE), **(shape | mode | options))


def modules_of(llm: LLM) -> dict[str, torch.nn.Module]:
    model = worker_of(llm.engine.executor).runner._model
    assert isinstance(model, torch.nn.Module)
    return dict(model.named_modules())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "a tied head" else pytest.mark.thorough)
        for name in MODELS
    ],
)
def test_requests_alone_and_in_company(
    name: str, tmp_path: Path, short_parts: None, kernels_anywhere: None
) -> None:
    """Cut into chunks, preempted, with prefixes that were computed before, beside others."""
    architecture, window = MODELS[name]
    options = {"tie_word_embeddings": True} if name == "a tied head" else {}
    model = make_hugging_face_model(
        architecture, max_position_embeddings=MAX_MODEL_LEN, sliding_window=window, **options
    )
    save(model, tmp_path)
    random_ = random.Random(name)
    family = [random_.randrange(3, VOCABULARY) for _ in range(50)]
    prompts = [[random_.randrange(3, VOCABULARY) for _ in range(length)] for length in (30, 61, 62)]
    prompts += [family[:50], [*family[:35], 5, 6]]
    params = [
        SamplingParams(
            max_tokens=8, temperature=number % 2, seed=number, ignore_eos=True, logprobs=1
        )
        for number in range(len(prompts))
    ]  # fmt: skip
    alone = load(tmp_path, num_blocks=14, num_threads=1, prefix_cache=False)
    layers = [path for path, one in modules_of(alone).items() if isinstance(one, InvariantLinear)]
    assert "lm_head" in layers
    assert len(layers) > 8 if name != "experts" else "model.layers.0.mlp.gate" in layers
    moe = [one for one in modules_of(alone).values() if isinstance(one, SparseMoe)]
    assert [one.invariant for one in moe] == [True] * (2 if name == "experts" else 0)
    expected = [
        alone.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)
    ]
    company = load(
        tmp_path,
        num_threads=1,
        num_blocks=12,
        preemption="recompute",
        max_num_requests=4,
        max_num_batched_tokens=45,
        long_prefill_token_threshold=25,
    )
    found = company.generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
    if window is None:  # it gives blocks back by itself
        assert company.engine.metrics().preemptions_total, "nobody lost its blocks"
    text = [*prompts[1], *expected[1].token_ids]
    [scored] = company.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert scored.prompt_logprobs[len(prompts[1]) :] == expected[1].logprobs
