"""Tests of products in C for every instruction set: of this machine, and of others by an emulator.

For Arm it needs `gcc-aarch64-linux-gnu`, `libc6-dev-arm64-cross` and `qemu-user`, else it is not
run and says so. QEMU knows neither AVX-512 nor AVX-VNNI. Refuses to know: how long they take.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.kernel_library.ahead import INSTRUCTION_SETS, cpu_features
from baton_kernels import (
    FORMATS_OF_ROWS,
    CodeLayout,
    LowRankSpan,
    PackedWeight,
    WeightFormat,
    reference,
)
from baton_kernels.native.ops import _CODES, _E2M1, _FORMATS
from tests.numerics.low_rank import draw_low_rank
from tests.numerics.test_native_ops import draw_integers
from tests.numerics.tolerances import assert_close

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "fakes" / "engine" / "linear_program.c"
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-w")
ARM = (("aarch64-linux-gnu-gcc",), ("qemu-aarch64", "-cpu", "max"))
X86 = (("x86_64-linux-gnu-gcc",), ("qemu-x86_64", "-cpu", "max"))
HERE = [one for one in INSTRUCTION_SETS if one.machine == platform.machine()]
pytestmark = [pytest.mark.large, pytest.mark.lengthy, pytest.mark.timeout(600)]
# Name: compiler, emulator, flags.
CPUS: dict[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "Arm without dot products": (*ARM, ["-march=armv8-a"]),
    "Arm with dot products": (*ARM, ["-march=armv8.2-a+dotprod"]),
    "Arm with products of mixed signs": (*ARM, ["-march=armv8.6-a+i8mm"]),
    "x86-64": (*X86, ["-march=x86-64"]),
    "x86-64 with AVX2": (*X86, ["-march=x86-64-v3"]),
    **{f"{one.name}, this machine": (["gcc"], [], one.flags) for one in HERE},
}
NEEDS = {f"{one.name}, this machine": one.needs for one in HERE}


@pytest.fixture(scope="module", params=CPUS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs it."""
    compiler, emulator, flags = CPUS[request.param]
    for needed in (*compiler[:1], *emulator[:1]):
        if shutil.which(needed) is None:
            pytest.skip(f"not run: no {needed} here")
    lacks = set(NEEDS.get(request.param, ())) - cpu_features()
    if lacks:
        pytest.skip(f"not run: this CPU has no {', '.join(sorted(lacks))}")
    path = tmp_path_factory.mktemp("program") / "linear"
    sources = (PROGRAM, *(ROOT / "kernels" / "csrc" / name for name in ("scratch.c", "tiles.c")))
    command = [*compiler, *FLAGS, *flags, "-static", *map(str, sources), "-o", str(path), "-lm"]
    subprocess.run(command, check=True)
    return [*emulator, str(path)]


def run(program: Sequence[str], folder: Path, x: Tensor, weight: PackedWeight) -> Tensor:
    groups = (None,) * 4 if weight.groups is None else weight.groups.tensors
    types = (0 if one is None else _CODES[one.dtype] for one in groups[:3])
    tensors = (x, weight.panels, weight.scales, weight.bias, *groups)
    contents = [content_of(one) for one in tensors]
    num_rows, depth = x.shape
    columns = weight.out_features
    w_type = _E2M1 if weight.is_e2m1 else _FORMATS[weight.format]
    numbers = (_CODES[x.dtype], w_type, 0, 1, 0, num_rows, columns, depth, depth, columns)
    layout = (weight.group_size, *types, weight.has_fine_inputs)
    sizes = map(len, contents)
    header = struct.pack("<23q", *numbers, *layout, *sizes)
    (folder / "in").write_bytes(header + b"".join(contents))
    subprocess.run([*program, str(folder / "in"), str(folder / "out")], check=True)
    content = bytearray((folder / "out").read_bytes())
    return torch.frombuffer(content, dtype=torch.float32).view(num_rows, columns)


def content_of(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return b""
    content: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return content


def run_low_rank(
    program: Sequence[str], folder: Path, out: Tensor, x: Tensor, spans: Sequence[LowRankSpan]
) -> Tensor:
    """Return ``out`` after `add_low_rank`."""
    fields: list[int] = []
    contents = [content_of(x), content_of(out)]
    num_parts = 0
    for span in spans:
        a, parts = span.low_rank.a, span.low_rank.parts
        contents.append(content_of(a.panels))
        fields += (span.first, span.end - span.first, a.out_features, num_parts, len(parts))
        fields.append(len(contents[-1]))
        num_parts += len(parts)
    for part in (part for span in spans for part in span.low_rank.parts):
        contents += map(content_of, (part.b.panels, part.gains, part.shifts))
        fields += (part.first_rank, part.b.in_features, part.first_column, part.b.out_features)
        fields += map(len, contents[-3:])
    w_type = _FORMATS[spans[0].low_rank.a.format]
    sizes = (x.shape[1], out.shape[1], len(spans), num_parts, *map(len, contents[:2]))
    header = struct.pack(f"<{9 + len(fields)}q", _CODES[x.dtype], w_type, 1, *sizes, *fields)
    (folder / "in").write_bytes(header + b"".join(contents))
    words = ("low_rank", str(folder / "in"), str(folder / "out"))
    subprocess.run([*program, *words], check=True)
    content = bytearray((folder / "out").read_bytes())
    return torch.frombuffer(content, dtype=out.dtype).view(out.shape)


F16, I8 = torch.float16, torch.int8
LAYOUTS = (
    None,
    CodeLayout(WeightFormat.INT4, 32, I8, I8, F16),
    CodeLayout(WeightFormat.INT4, 128, F16, I8),
    CodeLayout(WeightFormat.INT4, 32, F16, is_e2m1=True),
    CodeLayout(WeightFormat.INT8, 16, I8, None, F16),
    CodeLayout(WeightFormat.INT8, 32, F16, F16),
    CodeLayout(WeightFormat.INT6, 16, I8, None, F16),
    CodeLayout(WeightFormat.INT6, 32, I8, I8, F16),
)


def test_products_are_those_of_the_definition(
    program: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # A CPU that rounds products before sums may round an input that lies between two numbers up.
    is_plain = "-march=x86-64" in CPUS[request.node.callspec.params["program"]][2]
    width = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    torch.manual_seed(0)
    shape, x = (45, 301), torch.randn(45, 301) / 300
    weights = [
        PackedWeight.pack(torch.randn(shape), torch.randn(45), one, width)
        for one in FORMATS_OF_ROWS
    ]
    for layout in filter(None, LAYOUTS):
        assert layout.format.code_bits is not None
        integers = draw_integers(layout.format.code_bits, shape, layout)
        weight = PackedWeight.empty(*shape, layout.format, width, layout=layout)
        weight.write_integers(0, integers)
        weights += weight, replace(weight, has_fine_inputs=True)
    for weight in weights:
        for inputs in (x, x.bfloat16()):
            together = run(program, tmp_path, inputs, weight)
            expected = reference.packed_linear(inputs.float(), weight)
            differs = is_plain and weight.groups is not None
            tolerance = float(expected.abs().max()) / 100 if differs else 2e-5
            torch.testing.assert_close(together, expected, rtol=1e-5, atol=tolerance)
            for part in (slice(5, 6), slice(3, 29)):
                assert torch.equal(run(program, tmp_path, inputs[part], weight), together[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_adapters_add_what_the_definition_adds(
    program: list[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    width = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    torch.manual_seed(0)
    x, out = torch.randn(45, 301).to(dtype), torch.randn(45, 150).to(dtype)
    columns = (slice(0, 70), slice(70, 150))
    drawn = [
        draw_low_rank(301, columns, ranks, dtype, width, has_gains=has_gains)
        for ranks, has_gains in (((1, 37), False), ((256, 8), True))
    ]
    spans = [LowRankSpan(2, 30, drawn[0]), LowRankSpan(30, 45, drawn[1])]
    together, expected = run_low_rank(program, tmp_path, out, x, spans), out.clone()
    reference.add_low_rank(expected, x, spans)
    assert_close(together, expected)
    for row in (2, 29, 44):
        alone = [LowRankSpan(0, 1, drawn[row >= 30])]
        found = run_low_rank(program, tmp_path, out[row : row + 1], x[row : row + 1], alone)
        assert torch.equal(found[0], together[row])
