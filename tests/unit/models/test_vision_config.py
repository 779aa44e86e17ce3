"""Unit tests of configurations with a vision encoder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig

TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def read(folder: Path, vision: dict[str, Any], *, images: bool = True) -> ModelConfig:
    whole = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": 5,
        "text_config": TEXT,
        "vision_config": vision,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_folder(folder, images=images)


def test_a_vision_encoder_is_read_if_images_are_asked_for(tmp_path: Path) -> None:
    assert read(tmp_path, VISION).vision is not None
    assert read(tmp_path, VISION, images=False).vision is None


def test_an_unsupported_vision_encoder_leaves_the_text_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = read(tmp_path, {**VISION, "hidden_act": "quick_swish"})
    assert config.vision is None
    assert config.num_layers == 2
    (line,) = caplog.messages
    assert line.startswith("prompts may have no images: ")
    assert "hidden_act" in line
    assert "quick_swish" in line
