"""Unit tests of models.loading.loader: what it accepts, and one clear line for what it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.api.errors import ModelLoadError
from models import load_model
from tests.numerics.tiny_models import (
    hugging_face_logits,
    make_hugging_face_model,
    paged_logits,
    save,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def theirs() -> Any:
    return make_hugging_face_model("LlamaForCausalLM")


@pytest.fixture
def folder(tmp_path: Path, theirs: Any) -> Path:
    return save(theirs, tmp_path)


@pytest.fixture
def sharded(tmp_path: Path, theirs: Any) -> Path:
    return save(theirs, tmp_path, max_shard_size="20KB")


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the single weights file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_sharded_equals_transformers(sharded: Path, theirs: Any) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    found = paged_logits(load_model(sharded), TOKENS)
    torch.testing.assert_close(found, hugging_face_logits(theirs, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_converts_the_dtype(folder: Path, dtype: torch.dtype) -> None:
    model = load_model(folder, dtype=dtype)
    assert isinstance(model, torch.nn.Module)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    assert {buffer.dtype for buffer in floats} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_weights_outlive_the_file(folder: Path, theirs: Any) -> None:
    model = load_model(folder)
    size = (folder / WEIGHTS).stat().st_size
    (folder / WEIGHTS).write_bytes(bytes(size))
    found = paged_logits(model, TOKENS)
    torch.testing.assert_close(found, hugging_face_logits(theirs, TOKENS), rtol=1e-4, atol=1e-4)


def test_tied_head_may_be_saved_if_it_is_the_embedding(tmp_path: Path) -> None:
    theirs = make_hugging_face_model("LlamaForCausalLM", tie_word_embeddings=True)
    folder = save(theirs, tmp_path)
    embedding = "model.embed_tokens.weight"
    edit(folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    torch.testing.assert_close(
        paged_logits(load_model(folder), TOKENS), hugging_face_logits(theirs, TOKENS)
    )
    edit(folder, lambda t: t.update({"lm_head.weight": t[embedding] + 1}))
    refused(folder, "lm_head.weight: differs from model.embed_tokens.weight")


def test_known_buffers_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda t: t.update({name: torch.ones(4)}))
    load_model(folder)


@pytest.mark.parametrize("form", ["{}_scale", "attn.{}_scale", "{}_proj.{}_scale"])
def test_scales_of_an_fp8_kv_cache(folder: Path, form: str) -> None:
    names = {kind: f"model.layers.1.self_attn.{form.format(kind, kind)}" for kind in "kv"}
    found = {names["k"]: torch.tensor(0.25), names["v"]: torch.tensor([3.0], dtype=torch.bfloat16)}
    edit(folder, lambda t: t.update(found))
    model = load_model(folder)
    layers = [layer.self_attn for layer in model.model.layers]  # type: ignore[attr-defined]
    assert [(layer.k_scale, layer.v_scale) for layer in layers] == [(1.0, 1.0), (0.25, 3.0)]


def test_scales_that_are_none(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_scale"
    for scale, said in ((0.0, "0.0"), (torch.inf, "inf"), (-1.0, "-1.0"), (torch.nan, "nan")):
        edit(folder, lambda t, scale=scale: t.update({name: torch.tensor(scale)}))  # type: ignore[misc]
        refused(folder, rf"{name}: must be one number above 0, got {said}$")
    edit(folder, lambda t: t.update({name: torch.ones(2)}))
    refused(folder, rf"{name}: must be one number above 0, got shape \[2\]$")


def test_missing_tensors(folder: Path) -> None:
    edit(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, "weights are missing: model.layers.1.mlp.up_proj.weight$")
    edit(folder, dict.clear)
    refused(folder, r"weights are missing: model.embed_tokens.weight, .* and 18 more$")


def test_extra_tensor(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    edit(folder, lambda t: t.update({name: torch.ones(32)}))
    refused(folder, rf"unknown to the model: {name} in model\.safetensors$")


def test_wrong_shape_and_dtype(folder: Path) -> None:
    name = "model.norm.weight"
    edit(folder, lambda t: t.update({name: torch.ones(31)}))
    refused(folder, rf"{name}: shape \[31\], but config.json means \[32\]")
    edit(folder, lambda t: t.update({name: torch.ones(32, dtype=torch.int8)}))
    refused(folder, f"{name}: dtype int8 is not supported")


@pytest.mark.parametrize("kept", [0, 4, 300, 20_000])
def test_truncated_file(folder: Path, kept: int) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:kept])
    refused(folder, r"model\.safetensors: not a readable safetensors file: ")


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, "no weights: neither model.safetensors nor model.safetensors.index.json")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, rf"{shard.name}: missing, but {INDEX} names it")


def test_broken_index(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": [}', encoding="utf-8")
    refused(sharded, "index.json: not valid JSON")
    (sharded / INDEX).write_text("{}", encoding="utf-8")
    refused(sharded, "index.json: weight_map: missing")
    escape = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (sharded / INDEX).write_text(json.dumps(escape), encoding="utf-8")
    refused(sharded, "weight_map: '../model.safetensors' is not a file name")


def test_window_that_the_config_does_not_give(tmp_path: Path) -> None:
    folder = save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values["layer_types"] = ["full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    refused(folder, "layer_types: sliding_attention without a sliding window")
