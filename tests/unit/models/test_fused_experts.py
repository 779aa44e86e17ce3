"""Unit tests of models.loading.fused_experts, on checkpoints in both of transformers' layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.api.errors import ModelLoadError
from models import load_model
from models.cpu.packing import CpuPacker
from tests.numerics.tiny_models import (
    hugging_face_logits,
    make_hugging_face_model,
    paged_logits,
    save,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


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


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    save(make_hugging_face_model("MixtralForCausalLM"), tmp_path, save_original_format=False)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"num_local_experts": 3}), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json means"):
        load_model(tmp_path)
