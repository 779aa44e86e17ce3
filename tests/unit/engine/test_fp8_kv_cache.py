"""Tests of an engine with a float8 KV cache: size, tokens, scales, and possible peers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from baton.link.words import NodeRegistration, NodeRole
from baton_kernels import FP8
from engine import LLM
from node_runtime.node_engine import FirstSteps, load_engine
from router.fleet.peers.pairing import incompatibility
from tests.fakes.handoff.kv_memories import memory_of
from tests.numerics.tiny_models import make_hugging_face_model, save

ARCHITECTURE = "Qwen3ForCausalLM"
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
PROMPTS = [
    [(7 * i * i + 3 * i + k) % 61 for i in range(length)] for k, length in enumerate((3, 30))
]
OPTIONS = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_hugging_face_model(ARCHITECTURE), tmp_path_factory.mktemp("tiny"))


def prompt_logprobs(llm: LLM) -> torch.Tensor:
    [completion] = llm.generate([PROMPTS[1]], SCORED)
    return torch.tensor([one.logprob for one in completion.prompt_logprobs if one is not None])


def test_a_block_takes_a_byte_for_each_number(folder: Path) -> None:
    memory = 10_000
    options = {"block_size": 4, "kv_cache_bytes": memory}
    wide, half, small = (
        LLM(str(folder), **options, dtype=dtype, kv_cache_dtype=kv_cache_dtype).engine
        for dtype, kv_cache_dtype in (("float32", "auto"), ("bfloat16", "auto"), ("float32", "fp8"))
    )
    assert small.kv_memory.tensor.dtype == FP8
    assert small.dtype == "float32"
    assert small.kv_memory.spec.block_bytes == 2 * 2 * 2 * 4 * 8  # layers, K and V, heads, tokens
    assert wide.kv_memory.spec.block_bytes == 4 * small.kv_memory.spec.block_bytes
    assert half.kv_memory.spec.block_bytes == 2 * small.kv_memory.spec.block_bytes
    assert small.num_blocks == memory // small.kv_memory.spec.block_bytes
    assert small.kv_memory.tensor.nbytes == small.num_blocks * small.kv_memory.spec.block_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_stay_close_and_are_not_the_same(folder: Path, dtype: str) -> None:
    exact, rounded = (
        prompt_logprobs(LLM(str(folder), dtype=dtype, kv_cache_dtype=kv_cache_dtype, **OPTIONS))
        for kv_cache_dtype in ("auto", "fp8")
    )
    difference = (exact - rounded).abs()
    assert 1e-3 < float(difference.mean()) < 0.15


@pytest.mark.parametrize("native_kernels", [True, False])
def test_tokens_do_not_depend_on_batch_and_cache(folder: Path, native_kernels: bool) -> None:
    llm = LLM(
        str(folder),
        kv_cache_dtype="fp8",
        long_prefill_token_threshold=8,
        native_kernels=native_kernels,
        **OPTIONS,
    )
    together = llm.generate(PROMPTS, GREEDY)
    again = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]  # the prefix is there
    assert [c.token_ids for c in together] == [c.token_ids for c in again]


def test_the_scales_of_a_checkpoint(tmp_path: Path) -> None:
    folder = save(make_hugging_face_model(ARCHITECTURE), tmp_path)
    options = {"dtype": "float32", **OPTIONS}
    plain = prompt_logprobs(LLM(str(folder), **options))
    unscaled = prompt_logprobs(LLM(str(folder), kv_cache_dtype="fp8", **options))
    errors = []
    weights = load_file(tmp_path / "model.safetensors")
    for scale in (0.125, 400.0):
        for layer in range(2):
            for kind in "kv":
                weights[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor(scale)
        save_file(weights, tmp_path / "model.safetensors")
        scaled = prompt_logprobs(LLM(str(folder), kv_cache_dtype="fp8", **options))
        assert torch.equal(prompt_logprobs(LLM(str(folder), **options)), plain), "nothing is stored"
        errors.append(float((scaled - plain).abs().mean()))
    before = float((unscaled - plain).abs().mean())
    assert errors[0] < before * 1.1, "a power of two loses nothing that fits"
    assert errors[1] > before * 3, "most numbers became too small"


@pytest.mark.medium
@pytest.mark.parametrize(("num_stages", "num_ranks"), [(2, 1), (2, 2)])
def test_stages_know_the_scales_of_each_others_layers(
    tmp_path: Path, num_stages: int, num_ranks: int
) -> None:
    folder = save(make_hugging_face_model(ARCHITECTURE), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for layer, scale in enumerate((0.125, 0.5)):
        weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(scale)
    save_file(weights, tmp_path / "model.safetensors")
    options = {"dtype": "float32", "kv_cache_dtype": "fp8", "num_threads": 1, **OPTIONS}
    alone, staged = (
        LLM(str(folder), pipeline_parallel_size=stages, tensor_parallel_size=ranks, **options)
        for stages, ranks in ((1, 1), (num_stages, num_ranks))
    )
    try:
        layouts = [llm.engine.kv_memory.manifest.layout for llm in (alone, staged)]
        assert layouts[0] == layouts[1]
        assert (prompt_logprobs(alone) - prompt_logprobs(staged)).abs().max() <= 1e-4
        tokens = [[c.token_ids for c in llm.generate(PROMPTS, GREEDY)] for llm in (alone, staged)]
        assert tokens[0] == tokens[1]
    finally:
        staged.engine.close()


def registered(folder: Path, kv_cache_dtype: str, role: NodeRole) -> NodeRegistration:
    config = EngineConfig(kv_cache_dtype=kv_cache_dtype, num_blocks=8, num_threads=1)
    loaded = load_engine(str(folder), config, node_name=role.value, kv_connector="in_memory")
    return loaded.registration(role.value, role, "", b"", FirstSteps())


def test_nodes_with_other_caches_are_not_paired(folder: Path) -> None:
    prefill = registered(folder, "fp8", NodeRole.PREFILL)
    decode = registered(folder, "auto", NodeRole.DECODE)
    assert incompatibility(prefill, decode) == (
        "kv_cache_dtype differs: prefill has float8_e4m3fn, decode has float32"
    )
    assert incompatibility(prefill, registered(folder, "fp8", NodeRole.DECODE)) == ""
    assert prefill.kv_bytes_per_token * 4 == decode.kv_bytes_per_token
    memories = [memory_of(torch.zeros(2, 2, 2, 1, 4, 8).to(dtype)) for dtype in (FP8, torch.uint8)]
    assert len({memory.manifest.layout for memory in memories}) == 2


def test_nodes_with_other_scales_are_not_paired(tmp_path: Path) -> None:
    """Equal bytes mean other keys and values under other scales."""
    folders = [tmp_path / name for name in ("plain", "scaled")]
    for folder in folders:
        save(make_hugging_face_model(ARCHITECTURE), folder)
    weights = load_file(folders[1] / "model.safetensors")
    weights["model.layers.1.self_attn.v_scale"] = torch.tensor(0.5)
    save_file(weights, folders[1] / "model.safetensors")
    plain = registered(folders[0], "fp8", NodeRole.PREFILL)
    scaled = registered(folders[1], "fp8", NodeRole.DECODE)
    found = {name: scaled.compatibility[name] for name in plain.compatibility}
    found.pop("weights", None)  # of two checkpoints they differ, too
    differing = {name for name, value in found.items() if value != plain.compatibility[name]}
    assert differing == {"kv_layout"}
    assert incompatibility(plain, scaled)
    # Where no byte is multiplied with them they are nothing to a pair.
    layouts = {registered(f, "auto", NodeRole.DECODE).compatibility["kv_layout"] for f in folders}
    assert len(layouts) == 1


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: must be one of auto, fp8, got 'int4'"):
        EngineConfig(kv_cache_dtype="int4")
