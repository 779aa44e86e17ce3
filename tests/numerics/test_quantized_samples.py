"""Layers of checkpoints that AutoRound and NVIDIA's ModelOpt wrote: their numbers, to the bit.

`tools/quantized_samples.py` made them, and says what each tool's own code makes of a weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from baton.api.errors import ModelLoadError
from baton.checkpoint.model_folder import MODELOPT_FILE
from models.config import ModelConfig
from models.fields import Fields
from models.loading.quantized_weights import read_quantized
from models.loading.stored_weights import StoredTensor, open_safetensors
from models.quantization import QuantizationConfig, parse_quantization
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tools.quantized_samples import digest

SAMPLES = {path.stem: path for path in Path(__file__).with_name("samples").glob("*.safetensors")}


@contextmanager
def weights_of(path: Path) -> Iterator[tuple[dict[str, StoredTensor], dict[str, str]]]:
    """Yield a sample's stored weights by layer and its metadata."""
    with safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata()
    quantization = parsed(json.loads(metadata["quantization_config"]))
    assert quantization is not None
    with ExitStack() as files:
        read = read_quantized(open_safetensors([path], files), quantization)
        yield {one.name.removesuffix(".weight"): one for one in read}, metadata


def parsed(config: Mapping[str, object], beside: Fields | None = None) -> QuantizationConfig | None:
    return parse_quantization(Fields({"quantization_config": config}, "config.json"), beside)


@pytest.mark.parametrize("name", SAMPLES)
def test_numbers_are_those_of_who_wrote_them(name: str) -> None:
    with weights_of(SAMPLES[name]) as (weights, metadata):
        assert len(weights) == 2
        for layer, stored in weights.items():
            assert digest(stored.read()) == metadata[layer]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_kept_stands_for_the_same_numbers(name: str) -> None:
    with weights_of(SAMPLES[name]) as (weights, _):
        with safe_open(SAMPLES[name], "pt") as file:
            names = set(file.keys())
        for layer, stored in weights.items():
            assert stored.read_integers is not None
            assert stored.read_float8 is not None
            kept = stored.read_integers() or stored.read_float8()
            is_scaled_first = f"{layer}.pre_quant_scale" in names
            assert (kept is None) == (is_scaled_first or name == "modelopt_mxfp8")
            if kept is not None:
                # AutoRound's scales are float16, in which it rounds.
                numbers, expected = kept.dequantized(), stored.read().float()
                torch.testing.assert_close(numbers, expected, rtol=2**-11, atol=0)
                assert name.startswith("auto_round") or torch.equal(numbers, expected)


def test_samples_are_there() -> None:
    assert len(SAMPLES) == 17


def test_rows_of_float8_as_meta_has_them() -> None:
    quantization = parsed({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})
    assert quantization == QuantizationConfig("fbgemm_fp8", rounds_inputs=True)
    numbers = torch.randn(8, 16).to(torch.float8_e4m3fn)
    parts = {"weight": numbers, "weight_scale": torch.rand(8, 1), "input_scale_ub": torch.ones(1)}
    weight = read_one(parts, quantization).read()
    assert torch.equal(weight, numbers.float() * parts["weight_scale"])


def test_modelopt_may_say_what_it_did_in_a_file_of_its_own(tmp_path: Path) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    beside = {"producer": {"name": "modelopt"}, "quantization": said}
    (tmp_path / MODELOPT_FILE).write_text(json.dumps(beside), encoding="utf-8")
    found = ModelConfig.from_folder(tmp_path).quantization
    assert found == QuantizationConfig("modelopt", block_shape=(128, 128))
    said["quant_algo"] = "W4A8_AWQ"
    (tmp_path / MODELOPT_FILE).write_text(json.dumps(beside), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=rf"{MODELOPT_FILE}: quantization\.quant_algo: 'W4A8_"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "becomes"),
    [
        ({"quant_algo": None, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, None),
        (
            {"quant_algo": "fp8_pb_wo"},
            QuantizationConfig("modelopt", block_shape=(128, 128)),
        ),
        (
            {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            QuantizationConfig("modelopt", block_shape=(128, 128), rounds_inputs=True),
        ),
        (
            {"quant_algo": "MIXED_PRECISION"},
            QuantizationConfig("modelopt", block_shape=(128, 128)),
        ),
    ],
)
def test_what_modelopt_says(config: dict[str, Any], becomes: QuantizationConfig | None) -> None:
    assert parsed({"quant_method": "modelopt", **config}) == becomes


@pytest.mark.parametrize(
    ("config", "becomes"),
    [
        ({"bits": 4}, QuantizationConfig("gptq", zero_point_offset=1)),
        (
            {"bits": 4, "packing_format": "auto_round:auto_gptq"},
            QuantizationConfig("gptq", zero_point_offset=1),
        ),
        (
            {"bits": 4, "backend": "auto_round:gptq:exllamav2"},
            QuantizationConfig("gptq", zero_point_offset=1),
        ),
        ({"bits": 4, "packing_format": "auto_round"}, QuantizationConfig("gptq")),
        ({"bits": 4, "packing_format": "auto_round:gptqmodel"}, QuantizationConfig("gptq")),
        ({"bits": 4, "packing_format": "auto_round:auto_awq"}, QuantizationConfig("awq")),
        (
            {"bits": 4, "data_type": "nv_fp", "packing_format": "auto_round:llm_compressor"},
            QuantizationConfig("compressed-tensors"),
        ),
        (
            {
                **{"bits": 8, "data_type": "fp", "packing_format": "auto_round:fp8"},
                **{"weight_block_size": [128, 128], "act_bits": 8},
            },
            QuantizationConfig("fp8", block_shape=(128, 128), rounds_inputs=True),
        ),
        ({"bits": 8, "data_type": "fp"}, QuantizationConfig("fp8")),
        (
            {
                **{"bits": 4, "group_size": 128, "packing_format": "auto"},
                "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
            },
            QuantizationConfig("gptq", group_size=128, zero_point_offset=1),
        ),
    ],
)
def test_what_autoround_says(config: dict[str, Any], becomes: QuantizationConfig) -> None:
    for method in ("auto-round", "intel/auto-round"):
        assert parsed({"quant_method": method, **config}) == becomes


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: 'W4A8_AWQ' is not"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "kv_cache_quant_algo: 'NVFP4' is not supported",
        ),
        (
            {
                **{"quant_method": "modelopt", "quant_algo": "FP8"},
                "kv_cache_scheme": {"num_bits": 4, "type": "float"},
            },
            "kv_cache_scheme: not supported",
        ),
        ({"quant_method": "auto-round", "bits": 5}, "bits: 5 is not supported"),
        (
            {
                **{"quant_method": "auto-round", "bits": 4, "data_type": "int"},
                "packing_format": "auto_round:llm_compressor",
            },
            "packing_format: 'auto_round:llm_compressor' is not supported",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "data_type": "mx_int"},
            "data_type: 'mx_int' is not supported",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "mine"},
            "packing_format: 'mine' is not supported",
        ),
        (
            {
                **{"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"},
                "extra_config": {"model.layers.0.mlp.down_proj": {"data_type": "mx_int"}},
            },
            "extra_config.model.layers.0.mlp.down_proj: data_type 'mx_int' beside 'mx_fp' is not",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "rotation_config": {"block_size": 32}},
            "rotation_config: not supported",
        ),
        ({"quant_method": "modelopt", "quant_algo": "x\ny"}, r"quant_algo: 'X\\nY' is not"),
    ],
)
def test_what_is_not_read_is_refused_in_one_line(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^config.json: quantization_config.{problem}"):
        parsed(config)


def test_the_last_columns_of_a_row_may_be_a_group_of_fewer() -> None:
    """Read a row as AutoRound packs it, without a tensor that lists each column's group."""
    quantization = QuantizationConfig("gptq", group_size=128)
    columns, rows, groups = 192, 8, 2
    scales = torch.rand(groups, rows).half()
    parts = {
        "qweight": torch.full((columns // 8, rows), 0x11111111, dtype=torch.int32),
        "qzeros": torch.zeros(groups, rows // 8, dtype=torch.int32),
        "scales": scales,
    }
    weight = read_one(parts, quantization).read()
    assert torch.equal(weight[:, :128], scales[:1].T.expand(rows, 128))
    assert torch.equal(weight[:, 128:], scales[1:].T.expand(rows, 64))
    other = QuantizationConfig("gptq", group_size=64)  # the rest's; 192 is no multiple of 96 then
    with pytest.raises(ModelLoadError, match="2 groups of 192 columns: the group size is unknown"):
        read_one(parts, other).read()


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("modelopt", {"weight": "uint8 4 8", "weight_scale": "float8_e4m3fn 4 1 1"}),
        ("modelopt", {"weight": "uint8 4 16", "weight_scale": "uint8 4 1 1"}),
        ("modelopt", {"weight": "uint8 4 16 1", "weight_scale": "uint8 4 1"}),
        ("fbgemm_fp8", {"weight": "float8_e4m3fn 4 16", "weight_scale": "float32 4 1 1"}),
        ("compressed-tensors", {"weight": "int8 4 16", "weight_scale": "uint8 4 1"}),
    ],
)
def test_scales_of_other_shapes_and_types_are_an_error_of_one_line(
    method: str, parts: dict[str, str]
) -> None:
    made = {}
    for name, text in parts.items():
        dtype, *sizes = text.split()
        made[name] = torch.ones(*map(int, sizes)).to(getattr(torch, dtype))
    if method == "modelopt" and made["weight_scale"].dtype == torch.float8_e4m3fn:
        made["weight_scale_2"] = torch.ones(())
    stored = read_one(made, QuantizationConfig(method, block_shape=(128, 128)))
    for read in (stored.read_integers, stored.read_float8):
        assert read is not None
        with suppress(ModelLoadError):
            assert read() is None
    with pytest.raises(ModelLoadError, match=r"^file: layer: its parts do not fit: [^\n]*$"):
        stored.read()


def read_one(parts: Mapping[str, torch.Tensor], quantization: QuantizationConfig) -> StoredTensor:
    stored = {
        f"layer.{name}": StoredTensor(Path("file"), f"layer.{name}", partial(torch.clone, one))
        for name, one in parts.items()
    }
    (read,) = read_quantized(stored, quantization)
    return read
