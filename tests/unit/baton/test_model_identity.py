"""Unit tests of a folder's identity: files that decide tokens change it, others do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton.api.errors import ModelLoadError
from baton.checkpoint.model_identity import folder_identity
from tests.fakes.checkpoints.demo_model import DEMO_MODEL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "chat_template"),
        ("generation_config.json", "generation_config"),
        ("config.json", "model"),
    ],
)
def test_each_file_has_its_entry(folder: Path, file: str, key: str) -> None:
    before = folder_identity(folder)
    path = folder / file
    if path.suffix == ".json" and path.is_file():
        path.write_text(json.dumps({**json.loads(path.read_text()), "another": 1}))
    else:
        path.write_text('{"another": 1}')
    after = folder_identity(folder)
    assert {name for name in before if before[name] != after[name]} == {key}


def test_who_wrote_the_generation_config_does_not_matter(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": 2, "transformers_version": "1"}')
    before = folder_identity(folder)
    path.write_text('{"transformers_version": "2", "eos_token_id": 2}')
    assert folder_identity(folder) == before


def test_weights_count_only_where_all_of_them_are(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before = folder_identity(folder)["weights"]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert folder_identity(folder)["weights"] != before
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": weights.name, "b": "more.safetensors"}}))
    assert "weights" not in folder_identity(folder)
    index.unlink()
    weights.unlink()
    assert "weights" not in folder_identity(folder)


def test_a_broken_file_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: not valid JSON"):
        folder_identity(folder)
