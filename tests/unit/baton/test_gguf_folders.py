"""Unit tests of the folders that are made for GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from gguf import GGMLQuantizationType

from baton.checkpoint.gguf.folder import code_digest
from baton.checkpoint.model_folder import find_model_folder
from tests.fakes.checkpoints.gguf_files import plain_vocabulary, write_gguf
from tests.unit.baton.test_gguf import FIELDS


def test_new_code_does_not_read_what_old_code_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep an upgrade from reading a config.json that lacks fields of the new version."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    rows = numpy.ones((40, 32), dtype=numpy.float32)
    tensors = {"token_embd.weight": (rows, GGMLQuantizationType.F32)}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", tensors, FIELDS, plain_vocabulary(40))
    shipped = find_model_folder(str(path))
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr("baton.checkpoint.gguf.folder._MAKERS", (code,))
    (code / "config.py").write_text("DTYPE = 'float32'\n")
    old = find_model_folder(str(path))
    assert find_model_folder(str(path)) == old
    (code / "config.py").write_text("DTYPE = 'bfloat16'\n")
    code_digest.cache_clear()  # as in a process that starts with the new code
    assert len({shipped, old, find_model_folder(str(path))}) == 3
