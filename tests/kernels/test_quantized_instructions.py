"""Tests of GPU instructions on packed codes, emulated as the PTX ISA defines them.

Triton's interpreter cannot run them, and a GPU is hardly ever at hand.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from baton_kernels.triton import quantized_linear as kernels

_STATEMENT = re.compile(r"(?P<name>[a-z][\w.]*)\s+(?P<operands>.+)")


def as_float32(bits: int) -> float:
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found


def bits_of_float32(number: float) -> int:
    found: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return found


def two_numbers(bits: int, dtype: torch.dtype) -> list[float]:
    halves = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.uint16)
    return halves.view(dtype).double().tolist()


def bits_of_two(numbers: list[float], dtype: torch.dtype) -> int:
    low, high = torch.tensor(numbers, dtype=torch.float64).to(dtype).view(torch.uint16).tolist()
    return int(low | high << 16)


def permuted(a: int, b: int, selector: int) -> int:
    """``prmt.b32``: each nibble of the selector names one of eight bytes."""
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = [selector >> 4 * place & 15 for place in range(4)]
    assert max(nibbles) < 8  # none repeats a sign
    return int.from_bytes(bytes(source[nibble] for nibble in nibbles), "little")


def fused(kind: str) -> Callable[[int, int, int], int]:
    dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16

    def run(a: int, b: int, c: int) -> int:
        parts = zip(*(two_numbers(one, dtype) for one in (a, b, c)), strict=True)
        return bits_of_two([x * y + z for x, y, z in parts], dtype)

    return run


def logic(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA  # (a & b) | c
    return a & b | c


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": permuted,
    "shr.u32": lambda a, count: a >> count,
    "lop3.b32": logic,
    "fma.rn.bf16x2": fused("bf16x2"),
    "fma.rn.f16x2": fused("f16x2"),
    "add.rn.f32": lambda a, b: bits_of_float32(
        float(np.float32(as_float32(a)) + np.float32(as_float32(b)))
    ),
    "cvt.rn.bf16x2.f32": lambda high, low: bits_of_two(
        [as_float32(low), as_float32(high)], torch.bfloat16
    ),
}


def run(text: str, inputs: tuple[int, ...], num_outputs: int) -> list[int]:
    """Run a block; inputs are the operands behind the outputs."""
    registers: dict[str, int] = {f"${num_outputs + place}": one for place, one in enumerate(inputs)}

    def value(operand: str) -> int:
        if operand.startswith("0x"):
            return int(operand, 16)
        if re.fullmatch("0f[0-9a-f]{8}", operand):
            return int(operand[2:], 16)
        return int(operand) if operand.isdigit() else registers[operand]

    for statement in re.split(r"[;{}]", text):
        line = statement.strip()
        if not line or line.startswith(".reg"):
            continue
        found = _STATEMENT.fullmatch(line)
        assert found is not None, line
        target, *operands = (one.strip() for one in found["operands"].split(","))
        assert target not in (f"${num_outputs + place}" for place in range(len(inputs)))
        registers[target] = OPERATIONS[found["name"]](*map(value, operands))
    return [registers[f"${place}"] for place in range(num_outputs)]


BLOCKS = [
    (name, dtype, bits, from_0)
    for dtype, of in ((torch.bfloat16, "BF16"), (torch.float16, "FP16"))
    for bits in (4, 8)
    for from_0, end in ((True, "_FROM_0"), (False, ""))
    for name in (f"_{of}_{bits}{end}",)
]


@pytest.mark.parametrize(("name", "dtype", "bits", "from_0"), BLOCKS)
def test_every_code_becomes_its_number_in_every_place(
    name: str, dtype: torch.dtype, bits: int, from_0: bool
) -> None:
    text: Any = getattr(kernels, name).value
    count, planes = 2**bits, 32 // bits
    for code in range(count):
        # Each plane has another code, and so have both words.
        codes = [
            [(code + 5 * plane + 3 * word) % count for plane in range(planes)] for word in (0, 1)
        ]
        words = tuple(sum(one << bits * place for place, one in enumerate(of)) for of in codes)
        found = run(text, words, planes)
        shift = 0 if from_0 else count // 2
        expected = [[float(of[plane] - shift) for of in codes] for plane in range(planes)]
        assert [two_numbers(pair, dtype) for pair in found] == expected


def test_a_wrong_constant_would_show() -> None:
    text: str = kernels._BF16_4.value.replace("0xc308c308", "0xc300c300")
    assert two_numbers(run(text, (0, 0), 8)[0], torch.bfloat16) == [0.0, 0.0]
    assert two_numbers(run(kernels._BF16_4.value, (0, 0), 8)[0], torch.bfloat16) == [-8.0, -8.0]
    assert math.isclose(as_float32(0x4B000080), 2**23 + 128)
