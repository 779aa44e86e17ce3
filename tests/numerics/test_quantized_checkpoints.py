"""Quantized checkpoints: numbers as their own tools make them, to the bit.

compressed-tensors compresses and decompresses its own formats. GPTQ and AWQ are packed here, as
their papers' code keeps them; what must come out is then known.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.api.errors import ModelLoadError
from models import load_model
from models.loading.quantized_weights import STORAGES, read_quantized
from models.loading.stored_weights import open_safetensors
from models.quantization import QuantizationConfig
from tests.numerics.tiny_models import make_hugging_face_model, save

ROWS, COLUMNS = 96, 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of numbers, low bits of a word first

Parts = dict[str, Tensor]

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "W4A16 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "W3A16": ("pack-quantized", {"num_bits": 3, "strategy": "channel"}),
    "W8A16": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "W5A16 of a tensor": ("pack-quantized", {"num_bits": 5, "strategy": "tensor"}),
    "W8A8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A8 with zero points": (
        "int-quantized",
        {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    ),
    "FP8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "FP8 dynamic": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "FP8 in blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [40, 24]},
    ),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
}


def least_and_most(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the least and the largest weight of each group that shares a scale."""
    rows, columns = weight.shape
    strategy = args.strategy
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.view(-1, high, padded.shape[1] // wide, wide).transpose(1, 2)
        return blocks.amin((2, 3)), blocks.amax((2, 3))
    groups = weight.view(rows, -1, args.group_size or columns)
    return groups.amin(2), groups.amax(2)


def compressed(name: str, weight: Tensor) -> tuple[Parts, Tensor, QuantizationConfig]:
    """The parts of a layer, what the library makes of them, and what the configuration says."""
    layout, options = SCHEMES[name]
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)
    parts: Parts = {"weight": weight}
    global_scale = None
    if layout.startswith("nvfp4"):
        global_scale = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
        parts["weight_global_scale"] = global_scale
    scale, zero_point = calculate_qparams(*least_and_most(weight, args), args, global_scale)
    parts["weight_scale"] = scale if global_scale is not None else scale.to(weight.dtype)
    parts["weight_zero_point"] = zero_point
    stored = compressor.compress(parts, scheme)
    restored = compressor.decompress(stored, scheme)["weight"]
    block = tuple(args.block_structure) if args.block_structure else None
    return stored, restored, QuantizationConfig("compressed-tensors", block_shape=block)


def read_one(folder: Path, parts: Parts, config: QuantizationConfig) -> Tensor:
    """A layer through a file."""
    path = folder / "one.safetensors"
    save_file({f"layer.{name}": part.contiguous() for name, part in parts.items()}, path)
    with ExitStack() as files:
        [stored] = read_quantized(open_safetensors([path], files), config)
        assert stored.name == "layer.weight"
        return stored.read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_are_those_of_compressed_tensors(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(ROWS, COLUMNS) / 20).to(dtype)
    stored, expected, config = compressed(name, weight)
    found = read_one(tmp_path, stored, config)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    alike = torch.nn.functional.cosine_similarity(found.float(), weight.float())
    assert alike.min() > 0.9  # it is that weight


def test_columns_may_be_grouped_in_the_order_of_activations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(-128, 128, (ROWS, COLUMNS)).to(torch.int8)
    scale, groups = torch.rand(ROWS, 4), torch.randint(0, 4, (COLUMNS,))
    parts = {"weight": numbers, "weight_scale": scale, "weight_g_idx": groups.int()}
    found = read_one(tmp_path, parts, QuantizationConfig("compressed-tensors"))
    assert torch.equal(found, numbers * scale[:, groups])


def pack(numbers: Tensor, num_bits: int) -> Tensor:
    """Words of numbers along the last dimension, the first one in the lowest bits."""
    per_word = 32 // num_bits
    words = numbers.long().view(len(numbers), -1, per_word) << torch.arange(per_word) * num_bits
    packed = words.sum(2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def as_gptq(
    weight: Tensor, num_bits: int, *, group: int, shuffled: bool, offset: int
) -> tuple[Parts, Tensor]:
    draw = torch.Generator().manual_seed(num_bits)
    num_groups = weight.shape[1] // group
    g_idx = torch.arange(weight.shape[1]) // group
    if shuffled:
        g_idx = g_idx[torch.randperm(weight.shape[1], generator=draw)]
    most = 2**num_bits - 1
    zeros = torch.randint(1, most, (num_groups, weight.shape[0]), generator=draw)
    scales = (torch.rand(num_groups, weight.shape[0], generator=draw) / most).half()
    numbers = torch.randint(0, most + 1, (weight.shape[1], weight.shape[0]), generator=draw)
    expected = (numbers - zeros[g_idx]).half() * scales[g_idx]
    parts = {
        "qweight": pack(numbers.T.contiguous(), num_bits).T.contiguous(),
        "qzeros": pack(zeros - offset, num_bits),
        "scales": scales,
        "g_idx": g_idx.to(torch.int32),
    }
    return parts, expected.T


@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_gptq(num_bits: int, shuffled: bool, offset: int, tmp_path: Path) -> None:
    weight = torch.empty(ROWS, COLUMNS)
    parts, expected = as_gptq(weight, num_bits, group=16, shuffled=shuffled, offset=offset)
    config = QuantizationConfig("gptq", zero_point_offset=offset)
    assert torch.equal(read_one(tmp_path, parts, config), expected)


def as_awq(weight: Tensor, *, group: int) -> tuple[Parts, Tensor]:
    draw = torch.Generator().manual_seed(3)
    rows, columns = weight.shape
    zeros = torch.randint(0, 16, (columns // group, rows), generator=draw)
    scales = (torch.rand(columns // group, rows, generator=draw) / 16).half()
    numbers = torch.randint(0, 16, (columns, rows), generator=draw)
    g_idx = torch.arange(columns) // group
    expected = (numbers - zeros[g_idx]).half() * scales[g_idx]

    def packed(of: Tensor) -> Tensor:
        return pack(of.view(len(of), -1, 8)[:, :, AWQ_ORDER].flatten(1), 4)

    return {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}, expected.T


def test_awq(tmp_path: Path) -> None:
    parts, expected = as_awq(torch.empty(ROWS, COLUMNS), group=32)
    assert torch.equal(read_one(tmp_path, parts, QuantizationConfig("awq")), expected)


def as_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Parts, Tensor]:
    rows, columns = (-(-size // one) for size, one in zip(weight.shape, block, strict=True))
    scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(4)) / 100
    numbers = (weight * 100).to(torch.float8_e4m3fn)
    places = [torch.arange(size) // one for size, one in zip(weight.shape, block, strict=True)]
    expected = numbers.float() * scale[places[0]][:, places[1]]
    return {"weight": numbers, "weight_scale_inv": scale}, expected


def as_rows_of_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def test_fp8_in_blocks_that_do_not_divide_a_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, expected = as_fp8(torch.randn(ROWS, COLUMNS), (40, 24))
    config = QuantizationConfig("fp8", block_shape=(40, 24))
    assert torch.equal(read_one(tmp_path, parts, config), expected)


# ---------------------------------------------------------------- whole checkpoints


def quantize_folder(
    folder: Path, config: dict[str, Any], make: Callable[[Tensor], tuple[Parts, Tensor]]
) -> Path:
    """Quantize the layers' products in place; returns a copy with what must come of them."""
    plain = folder.parent / "plain"
    shutil.copytree(folder, plain)
    file = folder / "model.safetensors"
    weights, expected = load_file(file), load_file(file)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        parts, restored = make(weights.pop(name))
        layer = name.removesuffix(".weight")
        weights |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        expected[name] = restored.float().contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return plain


def compressed_parts(weight: Tensor) -> tuple[Parts, Tensor]:
    return compressed("W4A16 with zero points", weight)[:2]


WHOLE: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Parts, Tensor]]]] = {
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "group_size": 16},
                }
            },
        },
        compressed_parts,
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [40, 24]},
        lambda weight: as_fp8(weight, (40, 24)),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        lambda weight: as_gptq(weight, 4, group=16, shuffled=True, offset=1),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda weight: as_awq(weight, group=32),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, as_rows_of_fp8),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, as_rows_of_fp8),
}


@pytest.mark.parametrize("method", WHOLE)
def test_a_quantized_checkpoint_is_the_model_of_its_numbers(method: str, tmp_path: Path) -> None:
    config, make = WHOLE[method]
    folder = save(
        make_hugging_face_model("Qwen3ForCausalLM", intermediate_size=64), tmp_path / "model"
    )
    plain = quantize_folder(folder, config, make)
    found, expected = load_model(folder, dtype=torch.float32), load_model(plain)
    theirs = dict(expected.named_parameters())  # type: ignore[attr-defined]  # a module
    for name, parameter in found.named_parameters():  # type: ignore[attr-defined]
        assert torch.equal(parameter, theirs[name]), name


def test_every_storage_is_tried_here() -> None:
    assert set(STORAGES) == set(WHOLE)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"weight_packed": "int32", "weight_shape": "int64"},
            "packed, weight_shape are not",
        ),
        ({"weight": "float8_e4m3fn"}, "weights of weight are not supported"),
        ({"weight": "int32", "weight_scale": "float32"}, "dtype torch.int32"),
        ({"weight": "int8", "weight_scale": "float32 3"}, "do not fit"),
        ({"weight": "float8_e4m3fn", "weight_scale": "float32 3"}, "do not fit"),
        ({"weight_packed": "uint8", "weight_scale": "float32"}, "weight_scale: dtype"),
    ],
)
def test_what_cannot_be_read_names_its_layer(
    parts: dict[str, str], problem: str, tmp_path: Path
) -> None:
    made = {}
    for name, kind in parts.items():
        dtype, _, size = kind.partition(" ")
        made[name] = torch.ones(int(size or 8), 8).to(getattr(torch, dtype))
    with pytest.raises(ModelLoadError, match=rf"one.safetensors: layer: .*{problem}"):
        read_one(tmp_path, made, QuantizationConfig("compressed-tensors"))
