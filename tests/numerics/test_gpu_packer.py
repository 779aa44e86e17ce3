"""Tests, by definition on a CPU, of which weights GPUs keep in few bits and how they round others.

The kernels are compared with that definition in `tests/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels import GroupedWeight, RoundedWeight
from baton_kernels import WeightFormat as CpuFormat
from baton_kernels.dispatch import native_ops
from baton_kernels.packed import FLOAT8
from baton_kernels.quantized import (
    QuantizedFormat,
)
from models import load_model
from models.cpu.packing import CpuPacker
from models.decoder import DecoderForCausalLM
from models.gpu.packing import GpuPacker, quantized_kinds
from models.layers.linear import PackedLinear, QuantizedLinear
from models.loading.loader import pack_loaded
from tests.numerics.test_quantized_checkpoints import (
    Parts,
    as_awq,
    as_fp8,
    as_gptq,
    compressed,
    quantize_folder,
)
from tests.numerics.tiny_models import make_hugging_face_model, paged_logits, save

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 16}
# Layers of two layers' attention and MLP.
LAYERS = 2 * 4


def load(
    folder: Path, weights: QuantizedFormat | None = None, *, has_float8: bool = True
) -> DecoderForCausalLM:
    packer = GpuPacker(torch.device("cpu"), weights, has_float8)
    model = load_model(folder, dtype=torch.float32, packer=packer)
    assert isinstance(model, DecoderForCausalLM)
    return model


def quantized(model: DecoderForCausalLM) -> dict[str, QuantizedLinear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}


def compressed_tensors(kind: str, *, inputs: bool) -> dict[str, Any]:
    bits, group = (4, 32) if kind == "int4" else (8, None)
    weights = {"num_bits": bits, "type": "float" if kind == "fp8" else "int", "group_size": group}
    group_0: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if inputs:
        group_0["input_activations"] = {"num_bits": 8, "type": weights["type"], "dynamic": True}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group_0}}


def by_library(name: str) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    return lambda weight: compressed(name, weight)[:2]


Making = tuple[dict[str, Any], Callable[[Tensor], tuple[Parts, Tensor]]]
# Checkpoint: its configuration, what makes a layer's parts, and what it becomes.
CHECKPOINTS: dict[str, tuple[Making, str]] = {
    "W4A16": ((compressed_tensors("int4", inputs=False), by_library("W4A16")), "int4"),
    "W4A16 with zero points": (
        (compressed_tensors("int4", inputs=False), by_library("W4A16 with zero points")),
        "int4",
    ),
    "W8A8": ((compressed_tensors("int8", inputs=True), by_library("W8A8")), "int8 rounded"),
    "W8A8, inputs left alone": (
        (compressed_tensors("int8", inputs=False), by_library("W8A8")),
        "int8",
    ),
    "FP8": ((compressed_tensors("fp8", inputs=True), by_library("FP8")), "fp8 rounded"),
    "FP8 dynamic": (
        (compressed_tensors("fp8", inputs=True), by_library("FP8 dynamic")),
        "fp8 rounded",
    ),
    "FP8, inputs left alone": (
        (compressed_tensors("fp8", inputs=False), by_library("FP8")),
        "numbers",
    ),
    "fp8 in blocks of 128": (
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            lambda weight: as_fp8(weight, (128, 128)),
        ),
        "fp8 rounded",
    ),
    "fp8 in blocks of 40 x 24": (
        (
            {"quant_method": "fp8", "weight_block_size": [40, 24]},
            lambda weight: as_fp8(weight, (40, 24)),
        ),
        "numbers",
    ),
    "GPTQ": (
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            lambda weight: as_gptq(weight, 4, group=32, shuffled=False, offset=1),
        ),
        "int4",
    ),
    "GPTQ in the order of activations": (
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            lambda weight: as_gptq(weight, 4, group=32, shuffled=True, offset=1),
        ),
        "numbers",
    ),
    "AWQ": (
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
            lambda weight: as_awq(weight, group=32),
        ),
        "int4",
    ),
}


def kind_of(weight: GroupedWeight | RoundedWeight) -> str:
    if isinstance(weight, GroupedWeight):
        return f"int{weight.bits}"
    return "fp8 rounded" if weight.numbers.dtype == FLOAT8 else "int8 rounded"


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "8" in name])
def test_float8_of_a_checkpoint_is_kept_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Whatever is said of inputs, which stay what they are; other blocks become numbers."""
    (config, make), _ = CHECKPOINTS[name]
    if "int" in str(config) or native_ops() is None:
        pytest.skip("no float8, or no native kernels here")
    folder = save(make_hugging_face_model("Qwen3ForCausalLM", **SIZES), tmp_path / "model")
    plain = quantize_folder(folder, config, make)
    packer = CpuPacker.choose(torch.float32, "auto")
    found, expected = (
        load_model(one, dtype=torch.float32, packer=packer) for one in (folder, plain)
    )
    assert isinstance(found, DecoderForCausalLM)
    layers = [one for one in found.modules() if isinstance(one, PackedLinear)]
    formats = [one.packed.format for one in layers]
    assert formats.count(CpuFormat.FP8) == (0 if "40 x 24" in name else LAYERS)
    ours, theirs = paged_logits(found, TOKENS), paged_logits(expected, TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoints_weights_are_kept(name: str, tmp_path: Path) -> None:
    (config, make), becomes = CHECKPOINTS[name]
    folder = save(make_hugging_face_model("Qwen3ForCausalLM", **SIZES), tmp_path / "model")
    plain = quantize_folder(folder, config, make)
    found, expected = load(folder), load(plain)
    assert not quantized(expected)
    layers = quantized(found)
    assert {kind_of(one.quantized) for one in layers.values()} == (
        set() if becomes == "numbers" else {becomes}
    )
    assert len(layers) == (0 if becomes == "numbers" else LAYERS)
    numbers = dict(expected.named_parameters())
    for path, layer in layers.items():
        weight = numbers[f"{path}.weight"]
        most = 2**-22 * float(weight.abs().max())  # zero points times scales are rounded alone
        kept = layer.quantized.dequantized()
        if name in ("GPTQ", "AWQ"):  # whose own tools multiply in float16
            kept = kept.half().float()
        torch.testing.assert_close(kept, weight, rtol=0, atol=most)
    ours, theirs = paged_logits(found, TOKENS), paged_logits(expected, TOKENS)
    if "rounded" in becomes:  # inputs are rounded, too
        assert 0 < error_of(ours, theirs) < 0.2
    else:
        tolerance = 1e-2 if name in ("GPTQ", "AWQ") else 1e-4
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_without_float8_its_numbers_are_loaded(tmp_path: Path) -> None:
    (config, make), _ = CHECKPOINTS["FP8 dynamic"]
    folder = save(make_hugging_face_model("Qwen3ForCausalLM", **SIZES), tmp_path / "model")
    plain = quantize_folder(folder, config, make)
    found = load(folder, has_float8=False)
    assert not quantized(found)
    assert torch.equal(paged_logits(found, TOKENS), paged_logits(load(plain), TOKENS))


WEIGHTS = {
    QuantizedFormat.INT4: ("int4", 0.6),
    QuantizedFormat.INT8_WEIGHT_ONLY: ("int8", 0.04),
    QuantizedFormat.INT8: ("int8 rounded", 0.08),
    QuantizedFormat.FP8: ("fp8 rounded", 0.25),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda one: one.value)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])  # with biases
def test_weights_are_rounded_as_they_are_loaded(
    architecture: str, weights: QuantizedFormat, tied: bool, tmp_path: Path
) -> None:
    sizes = SIZES if architecture == "Qwen3ForCausalLM" else {**SIZES, "head_dim": None}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    model = make_hugging_face_model(architecture, tie_word_embeddings=tied, **sizes)
    folder = save(model, tmp_path, max_shard_size="100KB")
    found, expected = load(folder, weights), load(folder)
    kind, most = WEIGHTS[weights]
    layers = quantized(found)
    assert len(layers) == LAYERS + (not tied)  # the embedding is the head, and stays
    head = layers.pop("lm_head", None)
    assert {kind_of(one.quantized) for one in layers.values()} == {kind}
    if head is not None:
        coarse = weights in (QuantizedFormat.INT4, QuantizedFormat.FP8)
        assert kind_of(head.quantized) == ("int8" if coarse else kind)
    ours, theirs = paged_logits(found, TOKENS), paged_logits(expected, TOKENS)
    assert 0 < error_of(ours, theirs) < most
    afterwards = load(folder)
    pack_loaded(GpuPacker(torch.device("cpu"), weights, has_float8=True), afterwards)
    assert torch.equal(paged_logits(afterwards, TOKENS), ours)


def test_a_checkpoint_of_another_format_is_rounded_anew(tmp_path: Path) -> None:
    (config, make), _ = CHECKPOINTS["W4A16"]
    folder = save(make_hugging_face_model("Qwen3ForCausalLM", **SIZES), tmp_path / "model")
    quantize_folder(folder, config, make)
    layers = quantized(load(folder, QuantizedFormat.INT8))
    assert {kind_of(one.quantized) for one in layers.values()} == {"int8 rounded"}


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("W4A16", QuantizedFormat.INT4),
        ("W8A8", QuantizedFormat.INT8),
        ("W8A8, inputs left alone", QuantizedFormat.INT8_WEIGHT_ONLY),
        ("fp8 in blocks of 128", QuantizedFormat.FP8),
    ],
)
def test_what_is_asked_for_and_stored_is_kept(
    name: str, weights: QuantizedFormat, tmp_path: Path
) -> None:
    (config, make), _ = CHECKPOINTS[name]
    folder = save(make_hugging_face_model("Qwen3ForCausalLM", **SIZES), tmp_path / "model")
    plain = quantize_folder(folder, config, make)
    numbers = dict(load(plain).named_parameters())
    layers = quantized(load(folder, weights))
    layers.pop("lm_head")  # which the checkpoint left alone
    assert len(layers) == LAYERS
    for path, layer in layers.items():
        torch.testing.assert_close(layer.quantized.dequantized(), numbers[f"{path}.weight"])


def test_groups_that_kernels_do_not_take_are_rounded_anew_if_that_is_asked_for(
    tmp_path: Path,
) -> None:
    sizes = {**SIZES, "hidden_size": 192, "intermediate_size": 192}
    config = compressed_tensors("int4", inputs=False)
    args: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 192}
    config["config_groups"]["group_0"]["weights"] = args
    folder = save(make_hugging_face_model("Qwen3ForCausalLM", **sizes), tmp_path / "model")

    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, columns = weight.shape
        scale = torch.rand(rows, 2) / 8  # of halves of a row
        numbers = torch.randint(-8, 8, (rows, columns)).to(torch.int8)
        wide = scale.repeat_interleave(columns // 2, dim=1)
        return {"weight": numbers, "weight_scale": scale}, numbers * wide

    quantize_folder(folder, config, make)
    layers = quantized(load(folder, QuantizedFormat.INT4))
    assert {kind_of(one.quantized) for one in layers.values()} == {"int4", "int8"}  # and the head
    assert len(layers) == LAYERS + 1


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256, "head_dim": 32}
    folder = save(make_hugging_face_model("Qwen3ForCausalLM", **sizes), tmp_path)
    found = {weights: quantized_kinds(load(folder, weights)) for weights in QuantizedFormat}
    assert found == {
        QuantizedFormat.INT4: ["int4 in groups of 128", "int8 in groups of all"],
        QuantizedFormat.INT8_WEIGHT_ONLY: ["int8 in groups of all"],
        QuantizedFormat.INT8: ["int8 times int8"],
        QuantizedFormat.FP8: ["fp8 times fp8", "int8 in groups of all"],
    }
    assert quantized_kinds(load(folder)) == []


def test_experts_and_routers_stay_numbers(tmp_path: Path) -> None:
    folder = save(make_hugging_face_model("Qwen3MoeForCausalLM"), tmp_path)
    names = quantized(load(folder, QuantizedFormat.INT8))
    assert names
    assert not [name for name in names if "mlp" in name]
