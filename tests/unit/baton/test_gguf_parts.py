"""Unit tests of GGUF files in several parts: they are one model, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf import GGMLQuantizationType

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf import parts
from baton.checkpoint.gguf.file import GgufFile
from baton.checkpoint.gguf.folder import read_folder
from baton.checkpoint.model_folder import find_model_folder
from baton.checkpoint.model_identity import folder_identity
from tests.fakes.checkpoints.gguf_files import plain_vocabulary, write_gguf

F32 = GGMLQuantizationType.F32
ONES = numpy.ones(4, dtype=numpy.float32)
ROWS = numpy.ones((40, 32), dtype=numpy.float32)
FIELDS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


def write(path: Path, more: dict[str, Any]) -> None:
    """Write three parts of one tensor each."""
    tensors = {"token_embd.weight": (ROWS, F32)} | more
    write_gguf(path, "llama", tensors, FIELDS, plain_vocabulary(40), num_parts=3)


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        find_model_folder(str(path))
    assert "\n" not in str(caught.value)


def write_parts(folder: Path) -> list[Path]:
    """Three parts of one tensor each."""
    folder.mkdir(exist_ok=True)
    more = {"output_norm.weight": (ONES, F32), "output.weight": (ROWS, F32)}
    write(folder / "big.gguf", more)
    return sorted(folder.glob("*.gguf"))


def test_the_parts_of_a_file_are_one_model(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "model")
    assert [path.name for path in parts] == [f"big-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    folder = find_model_folder(str(parts[0]))
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    assert list(read_folder(folder).tensors) == names
    for other in (*parts[1:], parts[0].parent):
        assert find_model_folder(str(other)) == folder
    before = folder_identity(folder)["weights"]
    content = parts[2].read_bytes()
    parts[2].write_bytes(content[:-1] + b"\1")
    assert folder_identity(folder)["weights"] != before


def test_the_header_of_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_YOUNG_NS", 0)
    path = tmp_path / "one.gguf"
    tensors = {"token_embd.weight": (ROWS, F32)}
    write_gguf(path, "llama", tensors, FIELDS, plain_vocabulary(5000))
    folder = find_model_folder(str(path))
    found = read_folder(folder)
    assert "tokenizer.ggml.tokens" in GgufFile.read(path).metadata
    assert "tokenizer.ggml.tokens" not in found.metadata  # it is kept, so it is to be small
    assert found.metadata["llama.block_count"] == 2
    assert read_folder(folder) is found
    write_gguf(path, "llama", tensors | {"x.weight": (ONES, F32)}, FIELDS, plain_vocabulary(5000))
    assert list(read_folder(folder).tensors) == ["token_embd.weight", "x.weight"]


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "model")
    contents = [path.read_bytes() for path in parts]
    parts[1].unlink()
    refused(parts[0], "big-00002-of-00003.gguf: missing: .* is the first")
    parts[1].write_bytes(contents[2])
    refused(parts[0], "split.no: part 2 of 3, expected part 1 of 3")
    parts[1].write_bytes(contents[0])
    refused(parts[0], "split.no: part 0 of 3, expected part 1 of 3")
    parts[1].write_bytes(contents[1][:100])
    refused(parts[0], "truncated")
    other = tmp_path / "other.gguf"
    other.write_bytes(contents[0])
    refused(other, "the first of 3 parts must be called NAME-00001-of-00003.gguf")


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    more = {"token_embx.weight": (ONES, F32), "output.weight": (ONES, F32)}
    write(tmp_path / "big.gguf", more)
    parts = sorted(tmp_path.glob("*.gguf"))
    content = parts[1].read_bytes()
    assert content.count(b"token_embx") == 1
    parts[1].write_bytes(content.replace(b"token_embx", b"token_embd"))
    refused(parts[0], "token_embd.weight: also in big-00001-of-00003.gguf")
