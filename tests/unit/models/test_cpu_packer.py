"""Tests that packing while reading gives the weights of a packed loaded model, in little memory.

Refuses to know: what computes with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.api.errors import ModelLoadError
from baton_kernels import FORMATS_OF_ROWS
from baton_kernels.dispatch import native_ops
from models import load_model
from models.cpu.packing import CpuPacker
from models.decoder import DecoderForCausalLM
from models.layers.embedding import PackedEmbedding
from models.layers.linear import PackedLinear
from models.loading.loader import pack_loaded
from tests.numerics.tiny_models import make_hugging_face_model, paged_logits, save

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
MIB = 2**20


def load(
    folder: Path, weights: str | None, dtype: torch.dtype = torch.float32, *, native: bool = True
) -> DecoderForCausalLM:
    packer = None
    if weights is not None:
        packer = CpuPacker.choose(dtype, weights, native_kernels=native)
    model = load_model(folder, dtype=dtype, packer=packer)
    assert isinstance(model, DecoderForCausalLM)
    return model


def packed_layers(model: DecoderForCausalLM) -> dict[str, PackedLinear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, PackedLinear)}


@pytest.fixture(params=["native", "torch"])
def kernels(request: Any) -> Any:
    """With and without a C library."""
    if request.param == "native" and native_ops() is None:
        pytest.skip("no native kernels here")
    return request.param


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["int4", "int8", "fp8", "bf16"])
def test_inputs_of_a_head_of_codes_are_fine(tmp_path: Path, weights: str, tied: bool) -> None:
    theirs = make_hugging_face_model("Qwen3ForCausalLM", tie_word_embeddings=tied)
    layers = packed_layers(load(save(theirs, tmp_path), weights))
    is_fine = {name: one.packed.has_fine_inputs for name, one in layers.items()}
    assert is_fine.pop("lm_head") == (weights != "bf16")
    assert not any(is_fine.values())


@pytest.mark.parametrize("weights", ["int4", "fp8"])
def test_a_small_model_that_is_rounded_coarsely_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: str
) -> None:
    folder = save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path)
    load(folder, "int8")
    assert "perplexity" not in caplog.text
    load(folder, weights)
    assert f"--weights {weights} rounds this model's weights" in caplog.text


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [one.value for one in FORMATS_OF_ROWS])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])  # with biases
def test_packed_on_the_way_equals_packed_afterwards(
    tmp_path: Path, kernels: str, architecture: str, weights: str, stored: torch.dtype
) -> None:
    tied = architecture == "Qwen3ForCausalLM"
    theirs = make_hugging_face_model(architecture, tie_word_embeddings=tied).to(stored)
    folder = save(theirs, tmp_path, max_shard_size="20KB")
    native = kernels == "native"
    found, expected = load(folder, weights, native=native), load(folder, None)
    packer = CpuPacker.choose(torch.float32, weights, native_kernels=native)
    assert packer is not None
    pack_loaded(packer, expected)
    ours, others = packed_layers(found), packed_layers(expected)
    assert ours.keys() == others.keys()
    assert len(ours) == 2 * 4 + 1
    for name, layer in ours.items():
        theirs_ = dict(others[name].named_parameters())
        for part, tensor in layer.named_parameters():
            assert torch.equal(tensor.view(torch.uint8), theirs_[part].view(torch.uint8)), name
    if stored == torch.float32:  # that of the cache of `paged_logits`
        assert torch.equal(paged_logits(found, TOKENS), paged_logits(expected, TOKENS))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", ["auto", *(one.value for one in FORMATS_OF_ROWS)])
def test_a_tied_embedding_is_the_head_in_the_heads_format(
    tmp_path: Path, weights: str, dtype: torch.dtype, stored: torch.dtype
) -> None:
    if native_ops() is None:
        pytest.skip("no native kernels here")
    theirs = make_hugging_face_model("Qwen3ForCausalLM", tie_word_embeddings=True).to(stored)
    model = load(save(theirs, tmp_path), weights, dtype)
    embedding, head = model.model.embed_tokens, model.lm_head
    assert isinstance(embedding, PackedEmbedding)
    assert isinstance(head, PackedLinear)
    rows = theirs.model.embed_tokens.weight.detach()
    found = embedding(torch.arange(len(rows)))
    assert found.dtype == dtype
    assert torch.equal(found, head.packed.unpacked().to(dtype))
    if weights == "auto":
        assert torch.equal(found, rows.to(dtype))
    largest = rows.abs().max()
    assert float((found - rows).abs().max()) <= float(largest) / 100  # half a step of 8 bits


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_an_embedding_apart_from_the_head_has_the_bits_of_its_numbers(
    tmp_path: Path, weights: str, stored: torch.dtype
) -> None:
    if native_ops() is None:
        pytest.skip("no native kernels here")
    theirs = make_hugging_face_model("Qwen3ForCausalLM", tie_word_embeddings=False).to(stored)
    embedding = load(save(theirs, tmp_path), weights).model.embed_tokens
    rows = theirs.model.embed_tokens.weight.detach().float()
    assert torch.equal(embedding(torch.arange(len(rows))), rows)
    assert [one.dtype for one in embedding.parameters()] == [stored]


def test_the_format_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    """Where that is exact: numbers in bfloat16 may be stored in float32."""
    if native_ops() is None:
        pytest.skip("no native kernels here")
    folder = save(make_hugging_face_model("LlamaForCausalLM").bfloat16().float(), tmp_path)
    assert {one.weight.dtype for one in packed_layers(load(folder, "auto")).values()} == {
        torch.bfloat16
    }
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][-1, -1] = 0.1  # of a part alone
    save_file(tensors, folder / "model.safetensors")
    layers = packed_layers(load(folder, "auto"))
    wide = [name for name, one in layers.items() if one.weight.dtype == torch.float32]
    assert wide == ["model.layers.1.self_attn.qkv_proj"]


def test_a_saved_head_is_compared_with_a_packed_embedding(tmp_path: Path) -> None:
    if native_ops() is None:
        pytest.skip("no native kernels here")
    theirs = make_hugging_face_model("LlamaForCausalLM", tie_word_embeddings=True)
    folder = save(theirs, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    load(folder, "auto")
    tensors["lm_head.weight"][60, 31] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight: differs from model\.embed_tokens"):
        load(folder, "auto")


PEAK = """
import json, sys, torch
from baton_kernels.dispatch import native_ops
from engine.worker.host.host_memory import peak_growth
from models import load_model
from models.cpu.packing import CpuPacker

folder, small, weights = sys.argv[1:]
torch.set_num_threads(2)
torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
packer = CpuPacker.choose(torch.float32, weights)
load_model(small, dtype=torch.float32, packer=packer)  # what is imported, and threads
found = []
growth = peak_growth(
    lambda: found.append(load_model(folder, dtype=torch.float32, packer=packer))
)
kept = sum(one.numel() * one.itemsize for one in found[0].parameters())
print(json.dumps([growth, kept]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype | None, Path]:
    """By type, a tied head of 96 MiB in bfloat16, and layers; None: a small model of that kind."""
    architecture = "Qwen3ForCausalLM"
    shape = {"vocab_size": 49152, "hidden_size": 1024, "intermediate_size": 2048}
    theirs = make_hugging_face_model(architecture, tie_word_embeddings=True, **shape).bfloat16()
    small = make_hugging_face_model(architecture, tie_word_embeddings=True).bfloat16()
    folder = tmp_path_factory.mktemp("models")
    return {
        torch.bfloat16: save(theirs, folder / "16"),
        torch.float32: save(theirs.float(), folder / "32"),
        None: save(small, folder / "small"),
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    ("weights", "stored"),
    [
        ("auto", torch.bfloat16),
        ("auto", torch.float32),  # looked at first: 16 bits are enough
        pytest.param("fp32", torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param("int8", torch.bfloat16, marks=pytest.mark.thorough),
        ("int4", torch.bfloat16),
    ],
    ids=str,
)
def test_memory_grows_by_what_is_kept(
    large: dict[torch.dtype | None, Path], weights: str, stored: torch.dtype
) -> None:
    """32 MiB are for pages on their way."""
    if native_ops() is None or not Path("/proc/self/clear_refs").exists():
        pytest.skip("no native kernels, or no Linux")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(large[stored]), str(large[None]), weights],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    growth, kept = json.loads(done.stdout)
    assert kept > 48 * MIB
    assert growth < 1.05 * kept + 32 * MIB
