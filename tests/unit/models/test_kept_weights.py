"""Weights mapped from the user's cache are the weights that a process packs, bit for bit."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baton.checkpoint import weights_cache
from baton.checkpoint.weights_cache import WeightsCache
from baton_kernels.dispatch import native_ops
from models import load_model
from models.cpu.packing import CpuPacker, _Packing
from models.decoder import DecoderForCausalLM
from models.layers.latent_attention import PackedLatentProjection
from models.layers.linear import PackedLinear
from models.loading.stored_weights import WeightPart
from tests.numerics.tiny_models import make_hugging_face_model, paged_logits, save

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
CACHE = WeightsCache(2**30, least_bytes=0)
LATENTS = {
    **{"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
    },
    **{"first_k_dense_replace": 1, "n_shared_experts": 1},
}
KINDS: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True}, torch.float32),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": False}, torch.float32),  # biases
    ("LlamaForCausalLM", {"tie_word_embeddings": False}, torch.bfloat16),  # a narrow embedding
    ("Qwen3MoeForCausalLM", {}, torch.float32),
    ("DeepseekV3ForCausalLM", LATENTS, torch.float32),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the packed weights; checkpoints count however young they are."""
    # Not BATON_CACHE: kernels would be built there.
    monkeypatch.setattr(weights_cache, "cache_folder", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(weights_cache, "_YOUNG_NS", 0)
    return tmp_path / "cache" / "weights"


def load(path: Path, weights: str = "auto", cache: WeightsCache | None = CACHE) -> Any:
    packer = CpuPacker.choose(torch.float32, weights)
    model = load_model(path, dtype=torch.float32, packer=packer, cache=cache)
    assert isinstance(model, DecoderForCausalLM)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all that a model computes with, also what is no parameter."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        packed = [module.packed] if isinstance(module, PackedLinear) else []
        if isinstance(module, PackedLatentProjection):
            packed = list(module.packed)
        for number, weight in enumerate(packed):
            parts = (one for one in weight.tensors if one is not None)
            found |= {f"{name}/{number}/{place}": one for place, one in enumerate(parts)}
    return found


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(_bytes(tensor), _bytes(theirs[name])), name
    layers = [
        {n: one.packed.has_fine_inputs for n, one in model.named_modules() if _is_packed(one)}
        for model in (found, expected)
    ]
    assert layers[0] == layers[1]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, PackedLinear)


@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "fp8"])
@pytest.mark.parametrize(("architecture", "shape", "stored"), KINDS, ids=[k[0] for k in KINDS])
def test_the_first_process_and_later_ones_have_what_is_packed_without_a_cache(
    tmp_path: Path, folder: Path, architecture: str, shape: Any, stored: torch.dtype, weights: str
) -> None:
    path = save(make_hugging_face_model(architecture, **shape).to(stored), tmp_path / "model")
    expected = load(path, weights, None)
    first, second = load(path, weights), load(path, weights)
    assert len(list(folder.glob("*.weights"))) == 1
    assert first.mapped_bytes == second.mapped_bytes > 0
    assert expected.mapped_bytes == 0
    for found in (first, second):
        assert_same(found, expected)
        if stored is torch.float32 and shape is not LATENTS:  # as the cache of `paged_logits`
            assert torch.equal(paged_logits(found, TOKENS), paged_logits(expected, TOKENS))


def test_a_later_start_reads_no_weight_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path / "model")
    load(path)
    packed: list[bool] = []
    take = _Packing.take

    def note(packing: _Packing, owner: nn.Module, parts: Sequence[WeightPart]) -> bool:
        packed.append(take(packing, owner, parts))
        return packed[-1]

    monkeypatch.setattr(_Packing, "take", note)
    load(path)
    assert packed  # norms, which are not packed
    assert not any(packed)


def test_other_formats_and_changed_checkpoints_have_files_of_their_own(
    tmp_path: Path, folder: Path
) -> None:
    path = save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path / "model")
    load(path, "int8")
    load(path, "int4")
    assert len(list(folder.glob("*.weights"))) == 2
    other = make_hugging_face_model("Qwen3ForCausalLM")
    with torch.no_grad():
        other.lm_head.weight += 1.0
    save(other, path)  # under the same name, with the same size
    found = load(path, "int8")
    assert len(list(folder.glob("*.weights"))) == 3
    assert_same(found, load(path, "int8", None))


def test_a_checkpoint_that_changes_while_it_is_packed_is_not_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path / "model")
    write = weights_cache._write

    def touch_and_write(*arguments: Any) -> None:
        os.utime(path / "model.safetensors")
        write(*arguments)

    monkeypatch.setattr(weights_cache, "_write", touch_and_write)
    found = load(path)
    assert found.mapped_bytes == 0
    assert "the checkpoint was changed while it was read" in caplog.text
    assert not list(folder.glob("*.weights")) + list(folder.glob("*.new"))
    assert_same(found, load(path, cache=None))


def test_without_a_folder_or_room_a_process_keeps_its_own_weights(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path / "model")
    expected = load(path, cache=None)
    assert_same(load(path, cache=WeightsCache(1000, least_bytes=0)), expected)
    assert "--weights-cache" in caplog.text
    assert not list(folder.glob("*.weights"))
    assert_same(load(path, cache=WeightsCache(0, least_bytes=0)), expected)
    (tmp_path / "file").touch()
    monkeypatch.setattr(weights_cache, "cache_folder", lambda name: tmp_path / "file" / name)
    found = load(path)
    assert found.mapped_bytes == 0
    assert "not shared with other processes" in caplog.text
    assert_same(found, expected)


def test_a_warning_about_coarse_weights_comes_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path / "model")
    for _ in range(2):
        caplog.clear()
        load(path, "int4")
        assert "--weights int4 rounds this model's weights" in caplog.text


MAP = """
import sys, torch
from pathlib import Path
from baton.checkpoint import weights_cache
from baton.checkpoint.weights_cache import WeightsCache
from models import load_model
from models.cpu.packing import CpuPacker, _Packing

weights_cache._YOUNG_NS = 0
weights_cache.cache_folder = lambda name: Path(sys.argv[2]) / name
packer = CpuPacker.choose(torch.float32, "int8")
cache = WeightsCache(2**30, least_bytes=0)
model = load_model(sys.argv[1], dtype=torch.float32, packer=packer, cache=cache)
print(model.mapped_bytes, flush=True)
sys.stdin.read()
"""


@pytest.mark.medium
def test_two_processes_that_start_together_have_the_pages_once(
    tmp_path: Path, folder: Path
) -> None:
    if native_ops() is None or not Path("/proc/self/smaps").exists():
        pytest.skip("no native kernels or no procfs here")
    shape = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
    path = save(make_hugging_face_model("Qwen3ForCausalLM", **shape), tmp_path / "model")
    command = [sys.executable, "-c", MAP, str(path), str(folder.parent)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        outputs = [process.stdout for process in processes]
        sizes = [int(output.readline()) for output in outputs if output is not None]
        assert sizes[0] == sizes[1] > 2**20
        assert len(list(folder.glob("*.weights"))) == 1
        for process in processes:
            rss, pss, dirty = memory_of_weights(process.pid)
            assert rss >= sizes[0]
            assert pss <= 0.6 * rss  # each of the two counts for half of each page
            assert dirty == 0
    finally:
        for process in processes:
            process.communicate()


def memory_of_weights(pid: int) -> list[int]:
    """Return the resident, proportional and dirty bytes of a process's packed weights."""
    sums, is_weights = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_weights = ".weights" in line
        elif is_weights and key in sums:
            sums[key] += int(value.split()[0]) * 1024
    return list(sums.values())
