"""What a checkpoint keeps as groups of integers stays so on a CPU: the same numbers, packed.

Refuses to know: engines, how products of integers are computed.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from baton.checkpoint.model_folder import find_model_folder
from baton_kernels import GroupedIntegers, WeightFormat
from models import load_model
from models.architectures.decoder import DecoderForCausalLM
from models.cpu.packing import CpuPacker
from models.layers.linear import PackedLinear
from models.loading.quantized_weights import read_quantized
from models.loading.stored_weights import StoredTensor, open_safetensors
from models.quantization import QuantizationConfig
from tests.fakes.gguf_files import write_model
from tests.numerics.test_quantized_checkpoints import (
    COLUMNS,
    ROWS,
    SCHEMES,
    Parts,
    compressed,
    pack,
)
from tests.numerics.tiny_models import make_hugging_face_model, paged_logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


def load(folder: Path, weights: str) -> DecoderForCausalLM:
    packer = CpuPacker.choose(torch.float32, weights)
    model = load_model(folder, dtype=torch.float32, packer=packer)
    assert isinstance(model, DecoderForCausalLM)
    return model


def write_gguf(tmp_path: Path, kind: str) -> Path:
    model = make_hugging_face_model("LlamaForCausalLM", **SHAPE)
    return write_model(tmp_path / "model.gguf", model, GGMLQuantizationType[kind])


@pytest.mark.parametrize(
    ("kind", "format_"), [("Q8_0", WeightFormat.INT8), ("Q4_0", WeightFormat.INT4)]
)
def test_blocks_of_gguf_are_the_panels_numbers(
    kind: str, format_: WeightFormat, tmp_path: Path
) -> None:
    folder = find_model_folder(str(write_gguf(tmp_path, kind)))
    plain = load_model(folder, dtype=torch.float32)
    assert isinstance(plain, DecoderForCausalLM)
    kept = load(folder, "auto")
    layers = {name: one for name, one in kept.named_modules() if isinstance(one, PackedLinear)}
    assert len(layers) == 2 * 4 + 1  # of two decoder layers, and the head
    for name, layer in layers.items():
        assert layer.packed.format == format_
        theirs = plain.get_submodule(name).get_parameter("weight")
        assert torch.equal(layer.packed.unpacked(), theirs), name
    embeddings = [model.model.embed_tokens.get_parameter("weight") for model in (kept, plain)]
    assert torch.equal(*embeddings)
    found, expected = paged_logits(kept, TOKENS), paged_logits(plain, TOKENS)
    assert float((found - expected).norm() / expected.norm()) < 0.03  # inputs are rounded


@pytest.mark.parametrize("weights", ["fp32", "int8-weight-only"])
def test_another_format_that_is_asked_for_is_made_of_them(weights: str, tmp_path: Path) -> None:
    model = load(find_model_folder(str(write_gguf(tmp_path, "Q4_0"))), weights)
    layers = [one for one in model.modules() if isinstance(one, PackedLinear)]
    assert {layer.packed.format.value for layer in layers} == {weights}


def read_one(folder: Path, parts: Parts, config: QuantizationConfig) -> GroupedIntegers | None:
    """A layer as its file keeps it; what it dequantizes to is what it is read as."""
    path = folder / "one.safetensors"
    save_file({f"layer.{name}": part.contiguous() for name, part in parts.items()}, path)
    with ExitStack() as files:
        stored: StoredTensor
        [stored] = read_quantized(open_safetensors([path], files), config)
        assert stored.read_integers is not None
        kept = stored.read_integers()
        if kept is not None:
            expected = stored.read()
            numbers, groups = kept.numbers.to(expected.dtype), kept.scales.to(expected.dtype)
            scales = groups.repeat_interleave(kept.group_size, dim=1)[:, : numbers.shape[1]]
            assert torch.equal(numbers * scales, expected)
        return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_symmetric_integers_of_compressed_tensors_are_kept(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    parts, _, config = compressed(name, (torch.randn(ROWS, COLUMNS) / 20).to(dtype))
    kept = read_one(tmp_path, parts, config)
    _, options = SCHEMES[name]
    group = options.get("group_size") or COLUMNS
    symmetric = options.get("symmetric", True) and options["strategy"] in ("channel", "group")
    known = options.get("type", "int") == "int" and options["num_bits"] in (4, 8)
    assert (kept is not None) == (
        known and symmetric and (group in (32, COLUMNS) or group % 64 == 0)
    )


def as_symmetric_gptq(num_bits: int, group: int, zero: int) -> Parts:
    draw = torch.Generator().manual_seed(num_bits)
    numbers = torch.randint(0, 2**num_bits, (ROWS, COLUMNS), generator=draw)
    scales = torch.rand(COLUMNS // group, ROWS, generator=draw).half()
    return {
        "qweight": pack(numbers, num_bits).T.contiguous(),
        "qzeros": pack(torch.full((COLUMNS // group, ROWS), zero), num_bits),
        "scales": scales,
        "g_idx": (torch.arange(COLUMNS) // group).to(torch.int32),
    }


@pytest.mark.parametrize("num_bits", [4, 8])
def test_symmetric_gptq_is_kept(num_bits: int, tmp_path: Path) -> None:
    config = QuantizationConfig("gptq", num_bits, zero_point_offset=1)
    middle = 2 ** (num_bits - 1)
    parts = as_symmetric_gptq(num_bits, 32, middle - 1)
    kept = read_one(tmp_path, parts, config)
    assert kept is not None
    assert (kept.bits, kept.group_size, kept.scales.dtype) == (num_bits, 32, torch.float16)
    shuffled = {**parts, "g_idx": parts["g_idx"].flip(0)}
    assert read_one(tmp_path, shuffled, config) is None
    other_zeros = as_symmetric_gptq(num_bits, 32, middle - 2)
    assert read_one(tmp_path, other_zeros, config) is None
    assert read_one(tmp_path, as_symmetric_gptq(num_bits, 16, middle - 1), config) is None
