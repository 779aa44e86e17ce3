"""Compare products with 4- and 8-bit weights on a GPU with its vendor's bfloat16 products.

The linear layers of Qwen3-8B are timed with one token, a batch, and a prompt. Before timing, each
result is compared with its definition. Several copies of the weights take turns, so that the
weights exceed any cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.gpu_timing import (
    Row,
    copy_gb_per_s,
    excess_error,
    gb_per_s,
    interpret_without_gpu,
    median_us,
    num_bytes,
)

interpret_without_gpu()

from triton import TritonError  # noqa: E402

from baton_kernels import GroupedIntegers, Groups, reference  # noqa: E402
from baton_kernels.packed import FLOAT8  # noqa: E402
from baton_kernels.quantized import GroupedWeight, QuantizedWeight, RoundedWeight, four_bits  # noqa: E402
from baton_kernels.triton import quantized_linear as kernels  # noqa: E402
from baton_kernels.triton.fp8 import has_fp8  # noqa: E402

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TINY_LAYERS = {"o": (48, 256)}
TOKENS = (1, 8, 32, 64, 128, 256, 2048)
CACHE_BYTES = 200e6  # minimum number of bytes of all copies of a weight
ATOL, RTOL = 3e-2, 2e-2
FORMATS = (
    *("int4", "int4, zero points", "int4, groups of 32", "int8-weight-only"),
    *("int8", "fp8", "fp8, groups of 128"),
)
PROCESSES = 12


def weight_of(name: str, numbers: Tensor) -> QuantizedWeight:
    """Quantize a weight ``[out_features, in_features]`` to the format ``name``."""
    device, (out_features, size) = numbers.device, numbers.shape
    if name.startswith("fp8") or name == "int8":
        dtype = torch.int8 if name == "int8" else FLOAT8
        group = 128 if "groups" in name else None
        rounded = RoundedWeight.empty(out_features, size, dtype, group, device)
        rounded.round_rows(0, numbers)
        return rounded
    if name == "int4":
        integers: GroupedIntegers | None = four_bits(numbers)
    elif "zero" in name:  # with zero points, as in AWQ and GPTQ
        groups = numbers.view(out_features, -1, 128)
        low, high = groups.amin(2), groups.amax(2)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (groups / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
        both = Groups(scales, (-zeros).char())
        integers = GroupedIntegers.of(4, codes.flatten(1).byte(), both, 128)
    else:
        bits, group = (4, 32) if "4" in name else (8, size)
        groups = numbers.view(out_features, -1, group)
        scales = groups.abs().amax(2) / (7 if bits == 4 else 127)
        codes = (groups / scales.unsqueeze(2)).round().clamp(-8 if bits == 4 else -127, 127)
        integers = GroupedIntegers.of(bits, codes.flatten(1).char(), scales.bfloat16(), group)
    assert integers is not None
    weight = GroupedWeight.empty(out_features, integers, device)
    weight.write_rows(0, integers)
    return weight


def copy_of(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a copy of a weight in other memory."""
    if isinstance(weight, RoundedWeight):
        return replace(weight, numbers=weight.numbers.clone(), scales=weight.scales.clone())
    return replace(weight, codes=weight.codes.clone(), groups=weight.groups.map(torch.clone))


@dataclass(frozen=True, slots=True)
class Case:
    """A product to time.

    Attributes:
        row: the fields of the result's row that name the case.
        calls: calls of the product, each with weights in different memory.
        weight_bytes: bytes of the weight that one call reads.
        flops: floating-point operations of one call.
        expected: computes the right result; None: the result is not checked.
    """

    row: Row
    calls: Sequence[Callable[[], Tensor]]
    weight_bytes: int
    flops: float
    expected: Callable[[], Tensor] | None = None


def cases(device: str) -> Iterator[Case]:
    """Yield a case per layer, format of weights and number of tokens; bfloat16 comes first."""
    on_gpu = device != "cpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    layers, tokens = (LAYERS, TOKENS) if on_gpu else (TINY_LAYERS, (1, 3))
    for layer, (out_features, size) in layers.items():
        torch.manual_seed(0)
        numbers = torch.randn(out_features, size, device=device) / size**0.5
        inputs = {count: torch.randn(count, size, device=device).to(dtype) for count in tokens}
        plain = numbers.to(dtype)
        plains = _copies(plain, torch.clone, num_bytes(plain), device)
        for count, x in inputs.items():
            calls = [partial(functional.linear, x, one) for one in plains]
            row: Row = {"layer": layer, "tokens": count, "weights": "bfloat16"}
            yield Case(row, calls, num_bytes(plain), 2.0 * count * plain.numel())
        del plains
        for name in FORMATS:
            if name.startswith("fp8") and not (on_gpu and has_fp8(torch.device(device))):
                continue
            weight = weight_of(name, numbers)
            weight_bytes = num_bytes(*weight.tensors)
            copies = _copies(weight, copy_of, weight_bytes, device)
            ways: dict[str, Callable[[Tensor, Any], Tensor]] = {name: kernels.quantized_linear}
            if name == "fp8":
                ways["fp8, the vendor's"] = kernels.scaled_mm
            for way, function in ways.items():
                for count, x in inputs.items():
                    yield Case(
                        {"layer": layer, "tokens": count, "weights": way},
                        [partial(function, x, one) for one in copies],
                        weight_bytes,
                        2.0 * count * numbers.numel(),
                        partial(reference.quantized_linear, x, weight),
                    )


def _copies(one: Any, copy: Callable[[Any], Any], size: int, device: str) -> list[Any]:
    """Return the weight and copies of it, so many that together they exceed any cache."""
    count = max(1, -int(-CACHE_BYTES // size)) if device != "cpu" else 1
    return [one, *(copy(one) for _ in range(count - 1))]


def measure(device: str) -> Iterator[Row]:
    """Yield the row of each case as soon as the case is measured."""
    compile_ahead(device)
    read = copy_gb_per_s(device, 2**30 if device != "cpu" else 2**16)
    plain_us: dict[tuple[object, object], float] = {}
    for case in cases(device):
        row = dict(case.row)
        row |= {"part": "product", "what": "{layer}, {tokens} tokens, {weights}".format(**row)}
        place = row.pop("layer"), row.pop("tokens")
        try:
            if case.expected is not None:
                error = excess_error(case.calls[0](), case.expected(), ATOL, RTOL)
                if error > 0:
                    row["failed"] = f"off by {error:.3g}"
            us = median_us(case.calls, device)
        except (RuntimeError, TritonError) as problem:
            row["failed"] = str(problem).strip().splitlines()[0]
        else:
            if row.pop("weights") == "bfloat16":
                plain_us[place] = us
            row |= {
                "us": round(us, 2),
                "bfloat16 / ours": round(plain_us[place] / us, 2),
                "of copy": round(gb_per_s(case.weight_bytes, us) / read, 2),
                "TFLOP/s": round(case.flops / us / 1e6, 1),
            }
        yield row


def compile_ahead(device: str) -> None:
    """Compile all kernels in several processes, so that this process finds them compiled."""
    if device == "cpu":
        return
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_call_some, device), range(PROCESSES)))


def _call_some(device: str, share: int) -> None:
    """Run every n-th case once, so that its kernels are in Triton's cache afterwards."""
    for number, case in enumerate(cases(device)):
        if number % PROCESSES == share:
            with contextlib.suppress(RuntimeError, TritonError):
                case.calls[0]()
