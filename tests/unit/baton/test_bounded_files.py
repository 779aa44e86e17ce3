"""Files from others are read within limits, refused with one line, and never read for ever."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.access.api_keys import read_keys
from baton.api.bounded_files import MAX_DEPTH, read_object
from baton.api.errors import BatonError, ConfigError, ModelLoadError
from baton.checkpoint.gguf.file import GgufFile
from baton.checkpoint.model_folder import read_limits, weights_digest
from baton.checkpoint.model_identity import folder_identity
from baton.checkpoint.safetensors_header import read_header
from baton.checkpoint.sampling_defaults import read_sampling_defaults
from baton.cli.config_file import read_config_file
from baton.text.tokenizer import Tokenizer
from loadtest.load.datasets import read_dataset
from loadtest.load.traces import read_trace
from models.families.shared.mamba2 import refuse_time_step_limit
from models.fields import Fields
from router.intake.cache_salts import read_secret
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

DEEP = "[" * 5000 + "]" * 5000
LONG = "9" * 5000


def refused(read: Callable[[], object]) -> str:
    """Return the one line with which a file is refused."""
    with pytest.raises((BatonError, Exception)) as caught:
        read()
    assert isinstance(caught.value, BatonError) or "CommandError" in repr(type(caught.value))
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert len(line) < 1000
    return line


# ------------------------------------------------------------------ of operators


@pytest.mark.parametrize("text", [f"a = {DEEP}", f"a = {LONG}", "a = \x00", "a = [", "\ufeff"])
def test_a_file_of_options_or_keys_is_refused_by_one_line(tmp_path: Path, text: str) -> None:
    """Regression: five thousand brackets or digits gave tracebacks."""
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    assert str(path) in refused(lambda: read_config_file(path, "router", {}))
    assert str(path) in refused(lambda: read_keys(path))


@pytest.mark.parametrize("text", [DEEP, f'{{"a": {DEEP}}}', LONG, f'{{"timestamp": {LONG}}}'])
def test_a_dataset_or_trace_is_refused_by_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text, encoding="utf-8")
    assert str(path) in refused(lambda: read_dataset(path))
    assert str(path) in refused(lambda: list(read_trace(path)))


@pytest.mark.parametrize("number", ["1e999", "-1", "NaN", "1e300"])
def test_a_trace_has_finite_numbers(tmp_path: Path, number: str) -> None:
    path = tmp_path / "x.jsonl"
    line = f'{{"timestamp": {number}, "input_length": 1, "output_length": 1}}'
    path.write_text(line, encoding="utf-8")
    assert "line 1" in refused(lambda: list(read_trace(path)))


@pytest.mark.parametrize("place", ["/dev/zero", "/"])
def test_a_device_or_folder_is_not_read_without_end(place: str) -> None:
    path = Path(place)
    for read in (read_keys, read_dataset, read_object, read_secret, GgufFile.read, read_header):
        assert place in refused(lambda read=read: read(path))  # type: ignore[misc]
    assert place in refused(lambda: list(read_trace(path)))
    assert place in refused(lambda: read_config_file(path, "router", {}))


# ------------------------------------------------------------------ of checkpoints


def test_a_pipe_in_a_checkpoint_is_not_opened(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"):
        os.mkfifo(tmp_path / name)
    assert "not a regular file" in refused(lambda: read_limits(tmp_path))
    assert "not a regular file" in refused(lambda: weights_digest(tmp_path))
    assert "not a regular file" in refused(lambda: Tokenizer(tmp_path))
    assert read_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    "content", ["[" * 200_000, f'{{"a": {DEEP}}}', f'{{"a": {LONG}}}', '{"a": NaN}', "[]", "\x00"]
)
def test_an_object_is_refused_by_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    assert str(path) in refused(lambda: read_object(path))


def test_a_config_may_have_the_infinity_that_transformers_writes(tmp_path: Path) -> None:
    """Published files of models with Mamba-2 layers have `"time_step_limit": [0.0, Infinity]`."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"time_step_limit": [0.0, float("inf")]}), encoding="utf-8")
    assert "Infinity" in path.read_text(encoding="utf-8")
    refuse_time_step_limit(Fields.from_file(path))
    path.write_text('{"vocab_size": -Infinity}', encoding="utf-8")
    assert "vocab_size" in refused(lambda: Fields.from_file(path).integer("vocab_size"))


def test_an_object_may_be_as_deep_as_the_limit(tmp_path: Path) -> None:
    path, inner = tmp_path / "x.json", MAX_DEPTH - 1
    path.write_text(f'{{"a": {"[" * inner}{"]" * inner}}}', encoding="utf-8")
    read_object(path)
    path.write_text(f'{{"a": {"[" * MAX_DEPTH}{"]" * MAX_DEPTH}}}', encoding="utf-8")
    assert f"more than {MAX_DEPTH} levels" in refused(lambda: read_object(path))


@pytest.mark.parametrize("value", [10**30, 1.5, "7", [7], -1, 0, True, float("inf")])
def test_a_routers_limits_are_numbers_within_theirs(tmp_path: Path, value: object) -> None:
    config = {"vocab_size": value, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "vocab_size must be a number from 1" in refused(lambda: read_limits(tmp_path))


@pytest.mark.parametrize("weight_map", [[], 3, {"a": 3}, {"a": ["x"]}])
def test_an_index_maps_names_to_names(tmp_path: Path, weight_map: object) -> None:
    """Regression: a list in place of a file's name gave a traceback."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert "weight_map" in refused(lambda: folder_identity(tmp_path))


def safetensors(path: Path, header: object, num_bytes: int = 64, length: int | None = None) -> Path:
    """Write a file with this header and so many bytes of tensors."""
    text = json.dumps(header).encode()
    start = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(start + text + bytes(num_bytes))
    return path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data_offsets": [2**62, 2**62 + 16]}, "data_offsets"),
        ({"data_offsets": [0, 10**30]}, "data_offsets"),
        ({"data_offsets": [16, 0]}, "data_offsets"),
        ({"data_offsets": [48, 72]}, "data_offsets"),
        ({"data_offsets": [0.0, 16.0]}, "data_offsets"),
        ({"data_offsets": "x"}, "data_offsets"),
        ({"data_offsets": [8, 24]}, "overlaps a"),
        ({"shape": [5]}, "16 bytes cannot be"),
        ({"shape": [2**50]}, "shape"),
        ({"shape": [-4]}, "shape"),
        ({"shape": 4}, "shape"),
        ({"dtype": ["F32"]}, "dtype"),
    ],
)
def test_a_header_is_held_against_the_file(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    """Regression: an offset of 2**62 made the router read for ever."""
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    other = {**tensor, "data_offsets": [16, 32], **changes}
    line = refused(
        lambda: read_header(safetensors(tmp_path / "x.safetensors", {"a": tensor, "b": other}))
    )
    assert str(tmp_path / "x.safetensors") in line
    assert ": b: " in line
    assert problem in line


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**62, 2**64 - 1])
def test_a_headers_length_is_held_against_the_file(tmp_path: Path, length: int) -> None:
    refused(lambda: read_header(safetensors(tmp_path / "x.safetensors", {}, length=length)))


def test_a_large_file_with_a_broken_header_is_sampled_all_the_same(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [2**20], "data_offsets": [0, 2**22]}
    header = {"a": {**tensor, "data_offsets": [0, 2**62]}}
    path = safetensors(tmp_path / "model.safetensors", header)
    with path.open("r+b") as file:
        file.truncate(2**27)
    assert len(weights_digest(tmp_path)) == 16


def test_a_tensors_name_is_printable(tmp_path: Path) -> None:
    header = {"a\nb": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    path = safetensors(tmp_path / "x.safetensors", header)
    assert "a tensor's name is not printable: 'a\\nb'" in refused(lambda: read_header(path))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    """Regression: a hundred thousand tensors of the same bytes were all read."""
    tensor = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
    header = {str(number): tensor for number in range(100_000)}
    path = safetensors(tmp_path / "x.safetensors", header)
    assert "overlaps" in refused(lambda: read_header(path))


def test_a_template_too_deep_for_python_is_refused_by_one_line(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    template = tmp_path / "chat_template.jinja"
    for text in (
        "{% for a in b %}" * 21 + "{% endfor %}" * 21,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "1+" * 50_000 + "1 }}",
        "x" * (2**20 + 1),
    ):
        template.write_text(text, encoding="utf-8")
        refused(lambda: Tokenizer(tmp_path))
        assert "chat_template" in refused(lambda: Tokenizer(tmp_path, chat_template=template))


def test_a_tokens_id_has_a_limit(tmp_path: Path) -> None:
    """The library counts through all ids; without a limit that took minutes."""
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", tmp_path)
    description = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = description["model"]["vocab"]
    vocabulary[next(iter(vocabulary))] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    assert "token's id" in refused(lambda: Tokenizer(tmp_path))


def test_errors_are_those_of_their_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        read_object(tmp_path / "nothing")
    with pytest.raises(ConfigError):
        read_keys(tmp_path / "nothing")
