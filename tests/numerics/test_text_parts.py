"""Tests of the text network of checkpoints with images: every layout, full and sparse files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.api.errors import ModelLoadError
from baton.checkpoint.model_folder import read_limits
from models import load_model
from models.config import ModelConfig
from models.family import TextPart
from models.registry import MODELS
from tests.numerics.family_checkpoints import THREE_AXES, layers
from tests.numerics.family_gemma4 import gemma4_layers
from tests.numerics.tiny_models import (
    hugging_face_logits,
    make_hugging_face_model,
    paged_logits,
    save,
)

TOKENS = [5, 9, 33, 20, 7, 8, 11, 40, 22, 3, 4, 5, 6, 7, 8, 9, 10, 44, 23]
# As transformers wrote names before 4.52, and as it has them in memory since; Qwen's text of old.
OLDER = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
QWENS = {"model.language_model.": "model."}
OF_TEXT = ("language_model", "text_model", "lm_head")

TEXT_PARTS = [name for name in MODELS.names() if isinstance(MODELS.load(name), TextPart)]


def names_of(architecture: str, name: str, layout: str) -> str:
    """Return what a layout calls a tensor that has its newer name."""
    if layout == "newer" or architecture.startswith(("Idefics3", "SmolVLM")):
        return name
    for newer, older in (QWENS if "Qwen" in architecture else OLDER).items():
        if name.startswith(newer):
            return older + name.removeprefix(newer)
    return name.removeprefix("model.")  # of what sees images


@pytest.fixture(scope="module", params=TEXT_PARTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    architecture = request.param
    values = THREE_AXES if "Qwen" in architecture else {}
    values = layers("sf") if "Gemma3" in architecture else values
    values = (
        gemma4_layers("sf", head_dim=8, global_head_dim=8) if "Gemma4" in architecture else values
    )
    theirs = make_hugging_face_model(
        architecture, attn_implementation="eager", tie_word_embeddings=False, **values
    )
    return architecture, theirs, save(theirs, tmp_path_factory.mktemp("model"))


def rewrite(made: Any, folder: Path, layout: str, config: dict[str, Any] | None = None) -> Path:
    architecture, theirs, saved = made
    tensors = {
        names_of(architecture, name, layout): tensor.contiguous()
        for name, tensor in theirs.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = (saved / "config.json").read_text() if config is None else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def logits_of(folder: Path) -> Tensor:
    return paged_logits(load_model(folder, dtype=torch.float32), TOKENS)


@pytest.mark.parametrize("layout", ["older", "newer"])
def test_the_text_of_each_layout_computes_what_transformers_does(
    made: Any, tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, theirs, saved = made
    with caplog.at_level(logging.INFO, "models"):
        found = logits_of(rewrite(made, tmp_path, layout))
    torch.testing.assert_close(found, hugging_face_logits(theirs, TOKENS), rtol=1e-4, atol=1e-5)
    (line,) = [one for one in caplog.messages if "images are not computed" in one]
    num_tensors = len(theirs.state_dict()) - len(
        [name for name in theirs.state_dict() if any(part in name for part in OF_TEXT)]
    )
    assert f"{num_tensors} tensors, such as" in line
    assert set(load_file(saved / "model.safetensors"))  # (transformers' own names are tried, too)
    torch.testing.assert_close(logits_of(saved), found)


def test_an_early_file_of_qwens_has_no_object_of_the_text(made: Any, tmp_path: Path) -> None:
    architecture, theirs, saved = made
    if architecture not in (
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ):
        pytest.skip("all files of this family have one")
    whole = json.loads((saved / "config.json").read_text())
    text = whole.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **whole, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    found = logits_of(rewrite(made, tmp_path, "older", flat))
    torch.testing.assert_close(found, hugging_face_logits(theirs, TOKENS), rtol=1e-4, atol=1e-5)
    assert read_limits(tmp_path).vocab_size == 61


def test_published_files_of_gemma_leave_out_most_of_the_text(tmp_path: Path) -> None:
    """Read a config with as few text fields as those of 4 and 12 billion parameters."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    found = ModelConfig.from_dict(config)
    assert (found.architecture, found.num_heads, found.num_kv_heads) == ("Gemma3ForCausalLM", 8, 4)
    assert (found.head_dim, found.vocab_size, found.dtype) == (256, 262_208, "bfloat16")
    assert found.tie_word_embeddings
    assert found.eos_token_ids == {1, 106}
    assert (found.rope.factor, found.rope.theta) == (8.0, 1_000_000.0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    limits = read_limits(tmp_path)
    assert (limits.vocab_size, limits.max_position_embeddings) == (262_208, 131_072)


def test_another_text_network_is_refused_by_name() -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "ministral3", "hidden_size": 32},
    }
    problem = "model_type: 'ministral3' is not supported; supported: mistral"
    with pytest.raises(ModelLoadError, match=problem):
        ModelConfig.from_dict(config)
