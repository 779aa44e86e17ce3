"""Unit tests of models.loading.fused_experts, on checkpoints in both of transformers' layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.api.errors import ModelLoadError
from baton_kernels import CodeLayout, WeightFormat
from baton_kernels.dispatch import native_ops
from models import load_model
from models.cpu.packing import CpuPacker
from models.loading.fp4 import mxfp4, mxfp4_integers
from models.memory_needs import memory_needs
from tests.numerics.family_checkpoints import THREE_AXES
from tests.numerics.family_hybrids import delta_nets
from tests.numerics.tiny_models import (
    hugging_face_logits,
    make_hugging_face_model,
    paged_logits,
    save,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
EAGER = {"attn_implementation": "eager"}
FUSED = "model.language_model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_both_layouts_are_read(tmp_path: Path, architecture: str, fused: bool) -> None:
    theirs = make_hugging_face_model(architecture)
    save(theirs, tmp_path, save_original_format=not fused)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names) == fused
    expected = hugging_face_logits(theirs, TOKENS)
    for packer in (None, CpuPacker.choose(torch.float32, "auto")):
        found = paged_logits(load_model(tmp_path, packer=packer), TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("images", [False, True])
def test_fused_experts_beside_a_vision_encoder_are_read(tmp_path: Path, images: bool) -> None:
    shape = {**delta_nets("df"), **EAGER}
    theirs = make_hugging_face_model("Qwen3_5MoeForConditionalGeneration", **shape)
    loaded: list[Any] = []
    for fused in (False, True):
        path = save(theirs, tmp_path / str(fused), save_original_format=not fused)
        assert (FUSED in load_file(path / "model.safetensors")) == fused
        loaded.append(load_model(path, images=images))
    apart, together = (model.state_dict() for model in loaded)
    assert apart.keys() == together.keys()
    assert all(torch.equal(apart[name], together[name]) for name in apart)


@pytest.mark.parametrize("inner_size", [24, 32])
@pytest.mark.parametrize("turned", [False, True])
def test_inputs_may_come_before_outputs(tmp_path: Path, turned: bool, inner_size: int) -> None:
    """Published files of Qwen3-VL have this order; the second size makes projections square."""
    theirs = make_hugging_face_model(
        "Qwen3VLMoeForConditionalGeneration",
        moe_intermediate_size=inner_size,
        **THREE_AXES,
        **EAGER,
    )
    path = save(theirs, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    if turned:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    expected = hugging_face_logits(theirs, TOKENS)
    for packer in (None, CpuPacker.choose(torch.float32, "auto")):
        found = paged_logits(load_model(tmp_path, packer=packer), TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    save(make_hugging_face_model("MixtralForCausalLM"), tmp_path, save_original_format=False)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"num_local_experts": 3}), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json means"):
        load_model(tmp_path)


# ---------------------------------------------------------------- gpt-oss, gates and ups by turns


def save_mxfp4(folder: Path, **shape: Any) -> Any:
    """Save a tiny gpt-oss with experts in MXFP4, as it is published; return it dequantized."""
    shape = {"intermediate_size": 64, "sliding_window": 3} | shape
    theirs = make_hugging_face_model("GptOssForCausalLM", **shape)
    torch.manual_seed(1)
    stored = {}
    for name, parameter in theirs.state_dict().items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            stored[name] = parameter
            continue
        experts, inputs, outputs = parameter.shape
        size = [experts, outputs, inputs // 32]
        blocks = torch.randint(256, [*size, 16], dtype=torch.uint8)
        scales = torch.randint(122, 127, size, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=parameter.dtype))
    save(theirs, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps(values), encoding="utf-8")
    save_file(stored, folder / "model.safetensors")
    return theirs


def test_mxfp4_experts_are_the_numbers_of_transformers(tmp_path: Path) -> None:
    theirs = save_mxfp4(tmp_path)
    model: Any = load_model(tmp_path)
    expected = hugging_face_logits(theirs, TOKENS)
    torch.testing.assert_close(paged_logits(model, TOKENS), expected, rtol=1e-4, atol=1e-4)
    packed: Any = load_model(tmp_path, packer=CpuPacker.choose(torch.float32, "auto"))
    for kept, one, other in zip(
        packed.model.layers, model.model.layers, theirs.model.layers, strict=True
    ):
        fused = other.mlp.experts
        for name, weight in (("gate_up", fused.gate_up_proj), ("down", fused.down_proj)):
            outputs = weight.transpose(1, 2)  # [experts, out, in]
            if name == "gate_up":
                outputs = torch.cat([outputs[:, 0::2], outputs[:, 1::2]], dim=1)
            assert torch.equal(getattr(one.mlp, name).weight, outputs.flatten(0, 1))
            linear = getattr(kept.mlp, name)
            if native_ops() is not None:  # still integers, which stand for the same
                assert linear.packed.layout == CodeLayout(
                    WeightFormat.INT4, 32, torch.bfloat16, is_e2m1=True
                )
            assert torch.equal(linear.packed.unpacked(), outputs.flatten(0, 1))


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
def test_memory_of_mxfp4_experts_is_known_before(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, hidden_size=256, intermediate_size=512, vocab_size=640)
    model = load_model(tmp_path, packer=CpuPacker.choose(torch.float32, "auto"))
    assert isinstance(model, torch.nn.Module)
    kept = sum(one.numel() * one.itemsize for one in model.parameters())
    needed = memory_needs(model.config, folder=tmp_path).weights["auto"]
    # Biases are left out, and what fills up the panels of routers.
    assert needed == pytest.approx(kept, rel=3e-2)


def test_scales_that_are_no_numbers_are_kept_out_of_integers() -> None:
    packed, scale = torch.full((2, 16), 0x21, dtype=torch.uint8), torch.tensor([[127], [255]])
    scale = scale.to(torch.uint8)
    assert mxfp4_integers(packed, scale) is None
    assert not mxfp4(packed, scale)[1].isfinite().any()
    with pytest.raises(ValueError, match="do not fit"):
        mxfp4(packed[:, :15], scale)


def test_mxfp4_without_its_scales_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.experts\.0\.down_proj\.weight"):
        load_model(tmp_path)
