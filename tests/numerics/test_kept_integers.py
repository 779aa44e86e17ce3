"""Tests that integer groups of a checkpoint stay integers on a CPU: equal numbers, packed.

Refuses to know: engines, how products of integers are computed.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from baton.checkpoint.gguf.file import TENSOR_TYPES
from baton.checkpoint.model_folder import find_model_folder
from baton_kernels import CodeLayout, GroupedIntegers, Groups, WeightFormat
from models import load_model
from models.cpu.packing import CpuPacker
from models.decoder import DecoderForCausalLM
from models.layers.linear import PackedLinear
from models.loading.gguf_blocks import unpack_blocks
from models.loading.quantized_weights import read_quantized
from models.loading.stored_weights import StoredTensor, open_safetensors
from models.quantization import QuantizationConfig
from tests.fakes.checkpoints.gguf_files import RANDOM_KINDS, stored, write_model
from tests.numerics.test_quantized_checkpoints import (
    COLUMNS,
    ROWS,
    SCHEMES,
    Parts,
    as_awq,
    compressed,
    pack,
)
from tests.numerics.tiny_models import make_hugging_face_model, paged_logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
WIDE = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
KINDS = {
    "Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 6, "Q5_1": 6,
    "Q2_K": 4, "Q3_K": 4, "Q4_K": 4, "Q5_K": 6, "Q6_K": 6, "IQ4_NL": 8, "IQ4_XS": 8,
}  # fmt: skip
RANDOM_BLOCKS = tuple(kind for kind in KINDS if kind in RANDOM_KINDS)
BLOCK_BYTES = {one.name: one.bytes_per_block for one in TENSOR_TYPES.values()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


def load(folder: Path, weights: str) -> DecoderForCausalLM:
    packer = CpuPacker.choose(torch.float32, weights)
    model = load_model(folder, dtype=torch.float32, packer=packer)
    assert isinstance(model, DecoderForCausalLM)
    return model


def write_gguf(tmp_path: Path, kind: str) -> Path:
    shape = WIDE if kind in RANDOM_BLOCKS else SHAPE
    model = make_hugging_face_model("LlamaForCausalLM", **shape)
    return write_model(tmp_path / "model.gguf", model, GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_gguf_are_the_panels_numbers(kind: str, tmp_path: Path) -> None:
    folder = find_model_folder(str(write_gguf(tmp_path, kind)))
    plain = load_model(folder, dtype=torch.float32)
    assert isinstance(plain, DecoderForCausalLM)
    kept = load(folder, "auto")
    layers = {name: one for name, one in kept.named_modules() if isinstance(one, PackedLinear)}
    assert len(layers) == 2 * 4 + 1  # of two decoder layers, and the head
    for name, layer in layers.items():
        assert layer.packed.format.code_bits == KINDS[kind]
        theirs = plain.get_submodule(name).get_parameter("weight")
        assert torch.equal(layer.packed.unpacked(), theirs), name
    embeddings = [model.model.embed_tokens.get_parameter("weight") for model in (kept, plain)]
    assert torch.equal(*embeddings)
    if kind not in RANDOM_BLOCKS:  # whose logits are of any size
        found, expected = paged_logits(kept, TOKENS), paged_logits(plain, TOKENS)
        assert float((found - expected).norm() / expected.norm()) < 0.03  # inputs are rounded


def draw_blocks(kind: str, num_rows: int, seed: int) -> GroupedIntegers:
    values = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(seed)).numpy()
    content = torch.from_numpy(stored(values, GGMLQuantizationType[kind], seed))
    [block] = [one.bytes_per_block for one in TENSOR_TYPES.values() if one.name == kind]
    found = unpack_blocks(kind, content.view(num_rows, -1, block))
    assert found is not None
    return found


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
def test_parts_of_one_weight_may_be_of_two_kinds(first: str, second: str) -> None:
    """Join parts of two kinds: some files store queries and values differently, here one weight."""
    parts = [draw_blocks(kind, 8, seed) for seed, kind in enumerate((first, second))]
    alike = GroupedIntegers.alike(parts)
    assert len({part.layout for part in alike}) == 1
    for before, after in zip(parts, alike, strict=True):
        assert torch.equal(after.dequantized(), before.dequantized())
    if (first, second) == ("Q4_K", "Q6_K"):  # the usual mixture: factors stay
        layout = alike[0].layout
        assert (layout.group_size, layout.scales, layout.factors) == (16, torch.int8, torch.float16)


def test_zero_points_that_are_all_in_the_middle_go_beside_others() -> None:
    numbers, scales = torch.randint(-8, 8, (4, 128)), torch.rand(4, 1).half()
    symmetric = GroupedIntegers.of(4, numbers, scales, 128)
    minima = torch.randint(-15, 0, (4, 1)).to(torch.int8)
    other = GroupedIntegers.of(4, numbers + 8, Groups(scales, minima), 128)
    assert symmetric is not None
    assert other is not None
    alike, unchanged = GroupedIntegers.alike([symmetric, other])
    assert alike.layout == unchanged.layout == other.layout
    assert torch.equal(alike.dequantized(), symmetric.dequantized())


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
            found = kept.dequantized().to(expected.dtype)
            if expected.dtype == torch.float32 and kept.groups.minima is not None:
                # A zero point times such a scale is rounded.
                torch.testing.assert_close(
                    found, expected, rtol=0, atol=2e-5 * float(found.abs().max())
                )
            else:
                assert torch.equal(found, expected)
        return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_integers_of_compressed_tensors_are_kept(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    parts, _, config = compressed(name, (torch.randn(ROWS, COLUMNS) / 20).to(dtype))
    kept = read_one(tmp_path, parts, config)
    _, options = SCHEMES[name]
    assert (kept is not None) == (options.get("type", "int") == "int")
    if kept is not None:
        assert kept.bits == (4 if options["num_bits"] <= 4 else 8)
        has_zero_points = bool(parts.get("weight_zero_point", torch.zeros(1)).any())
        assert (kept.groups.minima is not None) == has_zero_points


def test_groups_of_other_sizes_are_not_kept() -> None:
    numbers, scales = torch.ones(4, 96, dtype=torch.int8), torch.rand(4, 4)
    assert GroupedIntegers.of(8, numbers, scales, 24) is None
    assert GroupedIntegers.of(8, numbers, scales[:, :2], 48) is None
    assert GroupedIntegers.of(8, numbers, scales[:, :3], 32) is not None


def as_gptq(num_bits: int, group: int, zeros: Tensor) -> Parts:
    draw = torch.Generator().manual_seed(num_bits)
    numbers = torch.randint(0, 2**num_bits, (ROWS, COLUMNS), generator=draw)
    scales = torch.rand(COLUMNS // group, ROWS, generator=draw).half()
    return {
        "qweight": pack(numbers, num_bits).T.contiguous(),
        "qzeros": pack(zeros.expand(COLUMNS // group, ROWS), num_bits),
        "scales": scales,
        "g_idx": (torch.arange(COLUMNS) // group).to(torch.int32),
    }


@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_gptq_is_kept(num_bits: int, tmp_path: Path) -> None:
    config = QuantizationConfig("gptq", zero_point_offset=1)
    middle = torch.tensor(2 ** (num_bits - 1))
    parts = as_gptq(num_bits, 32, middle - 1)
    kept = read_one(tmp_path, parts, config)
    assert kept is not None
    assert (kept.bits, kept.group_size) == (max(num_bits, 4), 32)
    assert (kept.groups.scales.dtype, kept.groups.minima) == (torch.float16, None)
    shuffled = {**parts, "g_idx": parts["g_idx"].flip(0)}
    assert read_one(tmp_path, shuffled, config) is None
    for zeros in (middle - 2, torch.arange(ROWS) % 2**num_bits):
        asymmetric = read_one(tmp_path, as_gptq(num_bits, 32, zeros), config)
        assert asymmetric is not None
        assert asymmetric.groups.minima is not None
    assert read_one(tmp_path, as_gptq(num_bits, 8, middle - 1), config) is None


def test_awq_is_kept(tmp_path: Path) -> None:
    parts, _ = as_awq(torch.empty(ROWS, COLUMNS), group=32)
    kept = read_one(tmp_path, parts, QuantizationConfig("awq"))
    assert kept is not None
    assert kept.layout == CodeLayout(WeightFormat.INT4, 32, torch.float16, torch.int8)


def test_e2m1_beside_other_integers_becomes_integers_of_eight_bits() -> None:
    numbers = torch.tensor([[1, -12, 8, 0] * 16], dtype=torch.int8)
    e2m1 = GroupedIntegers(4, numbers, Groups(torch.full((1, 2), 0.5)), 32, is_e2m1=True)
    plain = GroupedIntegers.of(4, numbers.clamp(-8, 7), torch.full((1, 1), 0.25), 64)
    assert plain is not None
    assert torch.equal(e2m1.dequantized(), numbers / 2)
    found = GroupedIntegers.alike([e2m1, plain])
    assert found[0].layout == found[1].layout == CodeLayout(WeightFormat.INT8, 32, torch.float32)
    assert torch.equal(found[0].dequantized(), e2m1.dequantized())
    assert torch.equal(found[1].dequantized(), plain.dequantized())


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_rows_in_another_order_are_the_same_integers(kind: str) -> None:
    blocks = torch.randint(256, (8, 2, BLOCK_BYTES[kind]), dtype=torch.uint8)
    kept = unpack_blocks(kind, blocks)
    assert kept is not None
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    part = kept.part(order, None)
    assert part is not None
    assert part.layout == kept.layout
    expected = kept.dequantized()[order]
    torch.testing.assert_close(part.dequantized(), expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(part.numbers, kept.numbers)
