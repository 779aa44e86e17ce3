"""Adapters over every format of a base model's weights: a product is added to the layer's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.adapters.files import Adapter, open_adapter, read_adapter
from baton_kernels import FORMATS_OF_ROWS, PackedWeight, WeightFormat
from baton_kernels.dispatch import native_ops
from models.adapters.experts import FIRST, AdaptedExperts
from models.adapters.factors import Factors
from models.adapters.low_rank import Piece, make_low_rank
from models.adapters.slots import AdaptedLinear
from models.adapters.step import StepSpans
from models.adapters.targets import TargetPart
from models.base import AdapterSpan
from models.layers.linear import GatedLinear, PackedLinear
from models.layers.moe import SparseMoe
from models.recipe import ExpertsSpec
from tests.fakes.adapter_files import pair, write_adapter

INPUTS, OUTPUTS, RANK, SCALE = 64, 48, 4, 2.0
NATIVE = native_ops()
WIDTH = 16 if NATIVE is None else NATIVE.panel_width
FORMATS = list(FORMATS_OF_ROWS)


def adapter_of(tmp_path: Path, inputs: int, outputs: int) -> tuple[Adapter, Factors]:
    tensors = pair(rank=RANK, inputs=inputs, outputs=outputs)
    adapter = read_adapter(write_adapter(tmp_path, tensors, r=RANK, lora_alpha=RANK * SCALE))
    [module] = open_adapter(tmp_path).modules.values()
    a, b = (torch.frombuffer(adapter.data[one.name], dtype=torch.float32) for one in module.tensors)
    return adapter, Factors(module, a.view(RANK, inputs), b.view(outputs, RANK) * SCALE)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_added_to_the_packed_layers_own(
    format_: WeightFormat, activation: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    adapter, factors = adapter_of(tmp_path, INPUTS, OUTPUTS)
    weight, bias = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    packed = PackedWeight.pack(weight, bias, format_, WIDTH)
    layer, step = PackedLinear(packed, activation=activation), StepSpans()
    site = AdaptedLinear(layer, step)
    piece = Piece(factors, [TargetPart("", slice(None))])
    site.loaded["it"] = make_low_rank(layer, adapter.files, [piece], dtype, WIDTH)
    x = torch.randn(5, INPUTS).to(dtype)
    step.spans = (AdapterSpan("it", 1, 3), AdapterSpan("another", 3, 4))
    found = site(x)
    plain = layer(x)
    for row in (0, 3, 4):
        assert torch.equal(found[row], plain[row])
    own = PackedLinear(packed)(x)[1:3].float()
    delta = x[1:3].float() @ factors.a.t() @ factors.b.t()
    expected = own + delta
    if activation is not None:
        gate, up = expected.chunk(2, dim=1)
        expected = nn.functional.silu(gate) * up
    error = float((found[1:3].float() - expected).abs().max() / expected.abs().max())
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def make_moe(inner: int) -> Any:
    spec = ExpertsSpec(num_experts=4, inner_size=inner, top_k=2, scoring="softmax", normalize=True)
    moe = SparseMoe(spec, INPUTS)
    for parameter in moe.parameters():
        nn.init.normal_(parameter)
    return moe.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("inner", [32, 40])  # whole panels, and padded ones
def test_experts_of_packed_mixtures(format_: WeightFormat, inner: int, tmp_path: Path) -> None:
    """Each expert's panels are found, also where halves are padded to whole panels."""
    torch.manual_seed(2)
    moe, step = make_moe(inner), StepSpans()
    gate_up, down = moe.gate_up.weight, moe.down.weight
    filled = torch.nn.functional.pad(gate_up.view(8, inner, -1), (0, 0, 0, -inner % WIDTH))
    moe.gate_up = PackedLinear(PackedWeight.pack(filled.flatten(0, 1), None, format_, WIDTH))
    moe.down = PackedLinear(PackedWeight.pack(down, None, format_, WIDTH))
    adapter, factors = adapter_of(tmp_path, INPUTS, inner)
    site = AdaptedExperts(moe, step)
    ups = TargetPart(f"model.layers.0.mlp.{FIRST}", slice(inner, 2 * inner), None, 2)
    part = site.make(adapter.files, [Piece(factors, [ups])], torch.float32, WIDTH)
    x, ids = torch.randn(6, INPUTS), torch.tensor([[0, 1], [2, 3], [2, 0], [1, 3], [2, 1], [0, 2]])
    weights = torch.rand(6, 2)
    plain = moe.mix(x, ids, weights, None, None)
    assert torch.equal(site.mix(x, ids, weights, None, None), plain)
    step.spans = (AdapterSpan("it", 1, 5),)
    site.loaded["it"] = part
    found = site.mix(x, ids, weights, None, None)
    assert torch.equal(found[[0, 5]], plain[[0, 5]])
    changed = plain.clone()
    for token, place in ((1, 0), (2, 0), (4, 0)):
        changed[token] += weights[token, place] * gain_of(moe, factors, x[token], inner)
    error = float((found - changed).abs().max() / changed.abs().max())
    assert error < (0.03 if format_.code_bits else 1e-4)


def gain_of(moe: SparseMoe, factors: Factors, x: torch.Tensor, inner: int) -> torch.Tensor:
    """Return what the adapter adds to the result of expert 2."""
    padded = math.ceil(inner / WIDTH) * WIDTH
    assert isinstance(moe.gate_up, PackedLinear)
    assert isinstance(moe.down, PackedLinear)
    halves = moe.gate_up.packed.unpacked().view(8, padded, INPUTS)[:, :inner]
    gate = nn.functional.silu(halves[4] @ x)
    middle = gate * (factors.b @ (factors.a @ x))
    return moe.down.packed.unpacked().view(4, INPUTS, inner)[2] @ middle


def test_gated_layers_without_packing(tmp_path: Path) -> None:
    adapter, factors = adapter_of(tmp_path, INPUTS, OUTPUTS)
    layer: Any = GatedLinear(INPUTS, {"gate": OUTPUTS // 2, "up": OUTPUTS // 2}, bias=False)
    step = StepSpans()
    site = AdaptedLinear(layer, step)
    piece = Piece(factors, [TargetPart("", slice(None))])
    site.loaded["it"] = make_low_rank(layer, adapter.files, [piece], torch.float32, WIDTH)
    step.spans = (AdapterSpan("it", 0, 2),)
    x = torch.randn(3, INPUTS)
    merged = layer.weight + factors.b @ factors.a
    gate, up = (x @ merged.t()).chunk(2, dim=1)
    expected = nn.functional.silu(gate) * up
    with torch.no_grad():
        torch.testing.assert_close(site(x)[:2], expected[:2], rtol=1e-4, atol=1e-4)
