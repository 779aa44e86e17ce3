"""Unit tests of Gemma 4's GGUF files: fields, end tokens, and one clear line for a bad file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf import GGMLQuantizationType, TokenType

from baton.checkpoint.gguf.config import config_of, generation_config_of
from baton.checkpoint.gguf.file import GgufFile
from baton.checkpoint.model_folder import find_model_folder
from models import ModelConfig
from tests.fakes.checkpoints.gguf_files import Vocabulary
from tests.fakes.checkpoints.vocabularies import VOCABULARIES
from tests.unit.baton.test_gguf import cache, refused, write

__all__ = ["cache"]  # a fixture

F32 = GGMLQuantizationType.F32
FIELDS: dict[str, Any] = {
    "block_count": 4,
    "attention.head_count_kv": [2, 1, 2, 1],
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "attention.shared_kv_layers": 2,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, True, False],
    "feed_forward_length": [48, 48, 96, 96],
    "rope.freq_base_swa": 20_000.0,
}
FREQS = "rope_freqs.weight"


def write_gemma4(path: Path, fields: Mapping[str, Any], factors: list[float] | None = None) -> Path:
    values = numpy.array(factors or [1.0, 1.0, *[1e30] * 6], dtype=numpy.float32)
    return write(path, "gemma4", tensors={FREQS: (values, F32)}, fields={**FIELDS, **fields})


def test_a_configuration_is_what_the_file_says(tmp_path: Path) -> None:
    path = write_gemma4(tmp_path / "model.gguf", {"final_logit_softcapping": 30.0})
    found = config_of(GgufFile.read(path))
    assert found["architectures"] == ["Gemma4ForCausalLM"]
    assert (found["head_dim"], found["num_key_value_heads"]) == (8, 2)
    of_full = {"head_dim": 16, "num_key_value_heads": 1}
    assert found["per_layer_config"] == {"1": of_full, "3": of_full}
    assert (found["intermediate_size"], found["use_double_wide_mlp"]) == (48, True)
    assert found["num_kv_shared_layers"] == 2
    assert found["attention_k_eq_v"], "no layer has a projection of values"
    assert found["final_logit_softcapping"] == 30.0
    ropes = found["rope_parameters"]
    assert ropes["full_attention"]["partial_rotary_factor"] == 0.25
    assert ropes["full_attention"]["rope_theta"] == 500_000.0
    assert ropes["sliding_attention"]["rope_theta"] == 20_000.0
    config = ModelConfig.from_folder(find_model_folder(str(path)))
    distances = [getattr(layer.mixer, "kv_distance", None) for layer in config.layers]
    assert distances == [None, None, 2, 2]


@pytest.mark.parametrize(
    ("fields", "factors", "message"),
    [
        ({"attention.head_count_kv": [2, 1, 1, 1]}, None,
         r"gemma4.attention.head_count_kv: layers of one type differ: \[2, 1, 1, 1\]"),
        ({"attention.head_count_kv": [2, 1]}, None,
         "gemma4.attention.head_count_kv: 2 entries for 4 layers"),
        ({"attention.head_count_kv": [2, 0, 2, 0]}, None,
         "gemma4.attention.head_count_kv: must be numbers above 0, got"),
        ({"attention.value_length_swa": 4}, None,
         "gemma4.attention.value_length_swa: must be the keys' length 8, got 4"),
        ({"rope.dimension_count": 4}, None,
         "gemma4.rope.dimension_count: must be the keys' length 16, got 4"),
        ({"feed_forward_length": [48, 96, 96, 96]}, None,
         r"gemma4.feed_forward_length: \[48, 96, 96, 96\] is not supported; the last 2 layers"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, None,
         "gemma4.rope.scaling.type: 'linear' is not supported"),
        ({"embedding_length_per_layer_input": 8}, None,
         "weights are missing: per_layer_token_embd.weight"),
        ({}, [1.0, 2.0, *[1e30] * 6], "rope_freqs.weight: must be 1 for the first of 8 pairs"),
        ({}, [1.0, 1e30], "rope_freqs.weight: must be 1 for the first of 8 pairs"),
        ({}, [1e30] * 8, "rope_freqs.weight: must be 1 for the first of 8 pairs"),
    ],
)  # fmt: skip
def test_a_file_of_another_network_is_refused(
    tmp_path: Path, fields: dict[str, Any], factors: list[float] | None, message: str
) -> None:
    refused(write_gemma4(tmp_path / "model.gguf", fields, factors), message)


def test_a_turn_and_a_call_of_a_tool_end_an_output(tmp_path: Path) -> None:
    tokens = ["a", "<eos>", "<turn|>", "<|tool_response>", "<tool_response|>"]
    types = [TokenType.NORMAL, *[TokenType.CONTROL] * 2, *[TokenType.USER_DEFINED] * 2]
    vocabulary = Vocabulary(tokens, [int(one) for one in types], kind="gemma4", merges=["a a"],
                            fields={"eos_token_id": 1})  # fmt: skip
    path = write(tmp_path / "model.gguf", "gemma4", vocabulary=vocabulary)
    assert generation_config_of(GgufFile.read(path)) == {"eos_token_id": [1, 2, 3]}


def test_a_vocabulary_needs_its_merges(tmp_path: Path) -> None:
    vocabulary = dataclasses.replace(VOCABULARIES["gemma4"](), merges=())
    refused(write(tmp_path / "model.gguf", vocabulary=vocabulary), "tokenizer.ggml.merges: missing")


def test_a_chat_template_is_the_file_s(tmp_path: Path) -> None:
    vocabulary = dataclasses.replace(VOCABULARIES["gemma4"](), chat_template="<|turn>user")
    folder = find_model_folder(str(write(tmp_path / "model.gguf", vocabulary=vocabulary)))
    found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert found["chat_template"] == "<|turn>user"


def test_an_image_projector_is_refused(tmp_path: Path) -> None:
    """Images need the folder with safetensors, because it has the encoder."""
    message = "an image projector .mmproj. is not read; images need the model's safetensors"
    path = write(tmp_path / "mmproj-model.gguf", "clip")
    refused(path, message)
    refused(tmp_path, message)
    model = write(tmp_path / "model.gguf")
    assert find_model_folder(str(tmp_path)) == find_model_folder(str(model))
