"""Unit tests of the memory profile, with real models: how large a cache an engine gives itself."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from baton.engine_config import GIB, EngineConfig
from baton.kv.layers import PagedKV
from engine import LLM
from engine.core.step_plan import SHARE
from engine.worker import memory_profile
from engine.worker.host.host_memory import HostMemory
from engine.worker.kv_cache import kv_cache_spec
from engine.worker.memory_profile import MAX_CPU_CACHE_BYTES, MemoryProfile
from engine.worker.warm_up import largest_step
from tests.numerics.tiny_models import make_hugging_face_model, save

SPEC = kv_cache_spec([PagedKV(2, 8)], 16, torch.float32)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[3, 4, 5], [7], [10, 11, 12, 13, 14, 15, 16, 17, 18]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    theirs = make_hugging_face_model("Qwen3ForCausalLM", max_position_embeddings=MAX_MODEL_LEN)
    return str(save(theirs, tmp_path_factory.mktemp("tiny")))


def make_llm(folder: str, **options: Any) -> LLM:
    defaults = {"block_size": BLOCK_SIZE, "max_num_requests": 3, "max_num_batched_tokens": 32}
    return LLM(folder, **(defaults | options))


# ---------------------------------------------------------------- on a CPU


def test_by_default_a_cpu_holds_a_full_batch_of_longest_requests(folder: str) -> None:
    engine = make_llm(folder, device="cpu").engine
    assert engine.num_blocks == 3 * MAX_MODEL_LEN // BLOCK_SIZE
    assert engine.max_model_len == MAX_MODEL_LEN


@pytest.mark.medium
def test_by_default_a_cpus_cache_is_a_gibibyte_at_most(tmp_path: Path) -> None:
    theirs = make_hugging_face_model("LlamaForCausalLM", max_position_embeddings=2**17)
    save(theirs, tmp_path)
    engine = make_llm(
        str(tmp_path), device="cpu", max_num_requests=40, max_num_batched_tokens=64
    ).engine
    num_bytes = engine.num_blocks * engine.kv_memory.spec.block_bytes
    assert num_bytes == MAX_CPU_CACHE_BYTES == GIB


def test_a_share_that_is_asked_for_is_taken(tmp_path: Path) -> None:
    # Blocks of a MiB: there would be many millions of small ones.
    theirs = make_hugging_face_model("LlamaForCausalLM", head_dim=512)
    save(theirs, tmp_path)
    default = make_llm(str(tmp_path), device="cpu", block_size=64).engine
    asked = make_llm(str(tmp_path), device="cpu", block_size=64, memory_utilization=0.97).engine
    assert default.num_blocks == 3
    assert asked.num_blocks > 100


@pytest.mark.parametrize("options", [{"num_blocks": 24}, {"kv_cache_bytes": 25_000}])
def test_what_is_said_is_not_measured(
    folder: str, options: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = make_llm(folder, memory_utilization=1e-9, **options).engine
    assert engine.num_blocks == 24  # 1 KiB each
    assert "memory of" not in caplog.text


@pytest.mark.medium
def test_one_line_says_where_the_memory_goes(tmp_path: Path) -> None:
    theirs = make_hugging_face_model("LlamaForCausalLM", intermediate_size=2**17)
    save(theirs, tmp_path)
    # The gated middle of a feed-forward has 256 x 2**17 floats: 128 MiB. In a process of its own:
    # what other tests left would be used first, or be given back meanwhile.
    code = (
        "import logging; logging.basicConfig(format='%(name)s %(message)s', level=logging.INFO)\n"
        "from engine import LLM\n"
        "from engine.worker import memory_profile; memory_profile.PLENTY = 10**9\n"
        f"LLM({str(tmp_path)!r}, device='cpu', block_size=4, max_num_requests=3,"
        " max_num_batched_tokens=256, long_prefill_token_threshold=200)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pattern = (
        r"^engine\.worker\.memory_profile memory of cpu: (\S+) GiB: weights (\S+), others (\S+), "
        r"activations (\S+), KV cache (\S+), free (\S+)$"
    )
    [found] = re.findall(pattern, done.stderr, re.MULTILINE)
    total, *parts = map(float, found)
    assert sum(parts) == pytest.approx(total, abs=0.05)
    weights, _, activations, _, _ = parts
    assert weights == pytest.approx(0.09, abs=0.01)  # 6 matrices of 32 x 2**17 floats
    # 0.125 in all: what loading freed stays in the heap, counts as others' and is used first.
    assert 0.06 <= activations < 1


def test_the_dummy_step_leaves_no_trace(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "PLENTY", 10**9)
    measured, told = make_llm(folder, device="cpu"), make_llm(folder, device="cpu", num_blocks=60)
    assert not measured.engine.kv_memory.tensor.any()
    assert measured.engine.num_steps == 0
    found = measured.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in found] == [c.token_ids for c in told.generate(PROMPTS, GREEDY)]


def test_a_cpu_with_plenty_of_memory_computes_no_dummy_step(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compute(*_: object) -> None:
        raise AssertionError("the largest step is computed")

    measured = make_llm(folder, device="cpu").engine
    monkeypatch.setattr(memory_profile, "_measure_peak", compute)
    caplog.set_level(logging.INFO)
    engine = make_llm(folder, device="cpu").engine
    assert engine.num_blocks == measured.num_blocks
    assert "activations are not measured" in caplog.text
    monkeypatch.setattr(memory_profile, "read_host_memory", lambda: HostMemory(2**20, 2**20))
    with pytest.raises(AssertionError, match="the largest step is computed"):
        make_llm(folder, device="cpu")


@pytest.mark.parametrize(("room", "has_plenty"), [(8_799, False), (8_800, True)])
def test_plenty_is_eight_times_the_weights_and_the_largest_cache(
    room: int, has_plenty: bool
) -> None:
    profile = MemoryProfile(
        total=room, used=0, weights=100, activations=0, utilization=1.0, largest_cache=1000
    )
    assert profile.has_plenty is has_plenty


# ---------------------------------------------------------------- too little


def test_too_little_memory_is_one_line_with_the_numbers(folder: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(folder, device="cpu", memory_utilization=1e-6)
    text = str(caught.value)
    assert text.startswith("memory_utilization: 1e-06 of cpu leaves 0 bytes for KV blocks of 1024")
    assert "at least 2 are needed (" in text
    assert "\n" not in text


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_a_share_outside_its_limits_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"^memory_utilization: must be in \(0, 1\], got"):
        EngineConfig(memory_utilization=share)


def test_activations_and_what_others_use_come_off_the_share() -> None:
    profile = MemoryProfile(
        total=1000, used=300, weights=100, activations=50, utilization=0.9, largest_cache=1000
    )
    assert profile.room == profile.kv_cache_bytes == 550


# ---------------------------------------------------------------- the largest step


@given(
    max_num_requests=st.integers(1, 20),
    more_tokens=st.integers(0, 200),
    threshold=st.integers(1, 100),
    max_seq_len=st.integers(1, 300),
)
def test_the_largest_step_is_admissible_and_no_other_is_larger(
    max_num_requests: int, more_tokens: int, threshold: int, max_seq_len: int
) -> None:
    budget = max_num_requests + more_tokens
    config = EngineConfig(
        max_num_requests=max_num_requests,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    step = largest_step(config, max_seq_len, SPEC)
    starts, sizes, known = (step.shares[column::SHARE] for column in (1, 2, 3))
    assert len(sizes) == max_num_requests
    assert all(1 <= size <= min(threshold, max_seq_len) for size in sizes)
    assert [start + size for start, size in zip(starts, sizes, strict=True)] == known
    most = min(budget, max_num_requests * min(threshold, max_seq_len))
    assert sum(sizes) == len(step.token_ids) == most
    assert known[0] == max_seq_len


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_all_of_it_stays_within_the_share(folder: str) -> None:
    free, total = torch.cuda.mem_get_info()
    share = 0.3 + (total - free) / total
    llm = make_llm(folder, device="cuda", dtype="float32", memory_utilization=share)
    left = torch.cuda.mem_get_info()[0]
    assert 0.2 * total < free - left <= 0.31 * total
    told = make_llm(folder, device="cuda", dtype="float32", num_blocks=60)
    found = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in found] == [c.token_ids for c in told.generate(PROMPTS, GREEDY)]
