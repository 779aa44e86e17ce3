"""Tests of a GGUF file of every architecture: fields, tensors and tokens equal the checkpoint's.

transformers makes a checkpoint, and tests/fakes/checkpoints/gguf_conversion.py converts it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.gguf import folder as gguf_folder
from baton.checkpoint.gguf.table import ARCHITECTURES
from baton.checkpoint.model_folder import find_model_folder
from engine import LLM
from models import ModelConfig
from models.loading.gguf_weights import read_gguf
from models.recipe import AttentionSpec
from tests.fakes.checkpoints.gguf_conversion import converted, write_checkpoint
from tests.numerics.gguf_families import GGUF_FAMILIES, SHAPE, common_fields
from tests.numerics.gguf_gemma import proportional_factors
from tests.numerics.gguf_table import CASES, PAGE, is_in_gate, table
from tests.numerics.tiny_models import make_hugging_face_model, save

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8]]
NUM_TOKENS = 8
# A file has its tensors' dtype, names ends of outputs otherwise, and has no layers that predict
# several tokens.
NOT_COMPARED = ("dtype", "eos_token_ids", "num_mtp_layers")
ROPE_TENSORS = {f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")}
MARKED_CASES = [
    pytest.param(*case, marks=() if is_in_gate(case) else pytest.mark.thorough) for case in CASES
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep folders of files apart, but not the native kernels, which take long to compile."""
    (tmp_path / "folders").mkdir()
    monkeypatch.setattr(gguf_folder, "own_cache_folder", lambda name: tmp_path / "folders")


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint, and what a converter makes of it."""

    theirs: Any
    tensors: dict[str, Tensor]
    fields: dict[str, Any]
    architecture: str


@functools.cache
def make(name: str, folder: Path) -> Case:
    family = GGUF_FAMILIES[name]
    theirs = make_hugging_face_model(family.model, **{**SHAPE, **family.shape})
    save(theirs, folder)
    config, architecture = copy.deepcopy(theirs.config), name.partition(" ")[0]
    config.allow_global_per_layer_attribute_access = True  # only converters read this tensor
    tensors = converted(architecture, load_file(folder / "model.safetensors"), config)
    rope = getattr(config, "rope_parameters", None) or {}
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = proportional_factors(config)
    for kind in ("short", "long"):
        if f"{kind}_factor" in rope:
            factors = torch.tensor(rope[f"{kind}_factor"])
            tensors[f"rope_factors_{kind}.weight"] = factors
    return Case(theirs, tensors, common_fields(config) | family.fields(config), architecture)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name: (make(name, folder / name.replace(" ", "")), folder / name.replace(" ", ""))


def tokens(model: str, **options: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    llm = LLM(model, dtype="float32", weights="fp32", kv_cache_bytes=16 << 20, **options)
    return [result.token_ids for result in llm.generate(PROMPTS, params)]


def shape_of(folder: Path) -> dict[str, Any]:
    """Return a configuration's fields without windows: tokens show that those are the same."""
    config = ModelConfig.from_folder(folder)
    layers = [
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=None))
        if isinstance(layer.mixer, AttentionSpec)
        else layer
        for layer in config.layers
    ]
    recipe = dataclasses.replace(config.recipe, layers=tuple(layers))
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {**fields, "recipe": recipe}


def test_every_architecture_has_a_row() -> None:
    assert {name.partition(" ")[0] for name in GGUF_FAMILIES} == set(ARCHITECTURES.names())


def test_the_page_lists_every_case() -> None:
    """After a change of the cases: run the program in `gguf_table`."""
    assert table(CASES) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_file_says_what_config_json_says(name: str, tmp_path: Path, made: Any) -> None:
    case, folder = made(name)
    path = write_checkpoint(
        tmp_path / "model.gguf",
        case.architecture,
        case.tensors,
        GGMLQuantizationType.F32,
        case.fields,
        vocab_size=case.theirs.config.vocab_size,
    )
    found = shape_of(find_model_folder(str(path)))
    expected = shape_of(folder)
    differing = {
        key: (found[key], value)
        for key, value in expected.items()
        if found[key] != value and key not in NOT_COMPARED
    }
    assert not differing
    assert tokens(str(path)) == tokens(str(folder)) == by_transformers(case.theirs)


@pytest.mark.parametrize(("name", "kind", "num_parts"), MARKED_CASES)
def test_tensors_and_tokens_are_those_of_the_file(
    name: str, kind: str, num_parts: int, tmp_path: Path, made: Any
) -> None:
    case, folder = made(name)
    path = write_checkpoint(
        tmp_path / "model.gguf",
        case.architecture,
        case.tensors,
        GGMLQuantizationType[kind],
        case.fields,
        vocab_size=case.theirs.config.vocab_size,
        num_parts=num_parts,
    )
    found = find_model_folder(str(path))
    config = ModelConfig.from_folder(found)
    read = {one.name: one.read() for one in read_gguf(found / "model.gguf", config)}
    again = converted(case.architecture, read, case.theirs.config)
    stored = _stored(path, num_parts)
    assert again.keys() == stored.keys() - ROPE_TENSORS
    for key, tensor in again.items():
        values = torch.from_numpy(stored[key])
        if _is_computed(case.architecture, key):
            torch.testing.assert_close(tensor, values, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensor.view(values.shape), values), key
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({key: value.contiguous() for key, value in read.items()}, twin / "model.safetensors")
    assert tokens(str(path)) == tokens(str(twin))


def by_transformers(theirs: Any) -> list[tuple[int, ...]]:
    """Generate greedily."""
    results = []
    for prompt in PROMPTS:
        result = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        results.append(tuple(result[0, len(prompt) :].tolist()))
    return results


def _stored(path: Path, num_parts: int) -> dict[str, Any]:
    """Read all tensors by the `gguf` package."""
    paths = [path]
    if num_parts > 1:
        paths = [
            path.with_name(f"model-{part + 1:05}-of-{num_parts:05}.gguf")
            for part in range(num_parts)
        ]
    found = {}
    for one in paths:
        for tensor in gguf.GGUFReader(one).tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            found[tensor.name] = values.reshape(tuple(reversed(tensor.shape.tolist()))).copy()
    return found


def _is_computed(architecture: str, name: str) -> bool:
    """Say whether values go through arithmetic that rounds."""
    plus_one = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
    return name.endswith("ssm_a") or (architecture in plus_one and name.endswith("norm.weight"))
