"""Sums and gathers of the ranks of one machine, which map each other's memory.

Each rank has a region of memory that all ranks map::

    flags      [programs, ranks] int32: the last meeting that each rank's program has reached
    parts      [programs, 2 slots, area]: the rank's own part of a tensor
    results    [programs, area]: the rank's share of a sum

Program p of a rank exchanges data only with program p of each other rank. Programs meet: each rank
writes the meeting's number into its flag in every region (release), and waits until the flags of
all ranks have this number or a later one (acquire)::

    in one pass      copy own part | meet | add all parts
    in two passes    copy own part | meet | add own share of all parts | meet | read all shares

Each rank adds in the order of the ranks and in float32, so all ranks get equal bits. The slots take
turns. A program writes to a slot again two calls later. By then, all ranks have begun the call
between, so all ranks have ended the call that read the slot. The number of calls is kept on the
device, so a CUDA graph can replay a call.

A program ends its wait if the host sets ``stop``, or if it has waited too long; then it sets
``stop`` itself. The results of a stopped call are meaningless. Refuses to know: how ranks map
memory, when a sum is computed in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import NUM_KEPT, Launch, Launcher

SUMMED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of tensors that can be summed
_SPINS_PER_CHECK = tl.constexpr(256)  # a waiting program reads ``stop`` once in so many rounds
_LINE_BYTES = 128
_UNIT = 16
_NUM_WARPS = 8
# Integers of each element size; a tensor is gathered as such integers
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def wait_for_flags(flags, present, numbers, stop, max_spins):
    """Wait until all flags have the number or a later one, or until ``stop`` is set."""
    missing = True
    spins = 0
    while missing:
        found = tl.atomic_add(flags, numbers * 0, mask=present, sem="acquire", scope="sys")
        # The difference is right also when numbers exceed 32 bits and begin again.
        missing = tl.sum((present & (found - numbers < 0)).to(tl.int32)) > 0
        spins += 1
        if missing & (spins % _SPINS_PER_CHECK == 0):
            missing = tl.load(stop, volatile=True) == 0
        if missing & (spins >= max_spins):
            tl.store(stop, 1)
            missing = spins < 0


@triton.jit
def meet(regions, program, number, stop, rank, max_spins, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Tell all ranks that this rank has reached a meeting, and wait for all ranks.

    The first barrier orders the stores of all threads before the release; the second barrier orders
    the acquire before the loads of all threads.
    """
    ranks = tl.arange(0, LANES)
    present = ranks < SIZE
    numbers = tl.zeros([LANES], tl.int32) + number
    bases = tl.load(regions + ranks, mask=present, other=0)
    own_base = tl.load(regions + rank) + tl.zeros([LANES], tl.int64)
    own_flags = (bases + (program * SIZE + rank) * 4).to(tl.pointer_type(tl.int32))
    others_flags = (own_base + (program * SIZE + ranks) * 4).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    tl.atomic_xchg(own_flags, numbers, mask=present, sem="release", scope="sys")
    wait_for_flags(others_flags, present, numbers, stop, max_spins)
    tl.debug_barrier()


@triton.jit
def area_of(regions, rank, index, like, AREA: tl.constexpr, FLAGS: tl.constexpr):
    """Return a pointer to area ``index`` of a rank's region, of the type of ``like``."""
    address = tl.load(regions + rank) + FLAGS + index.to(tl.int64) * AREA
    # so that a thread loads and stores 16 bytes at once
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def copy_part(tensor, area, first, share, num_elements, BLOCK: tl.constexpr):
    """Copy ``share`` elements of a tensor, from element ``first``, to an area."""
    for start in range(0, share, BLOCK):
        places = start + tl.arange(0, BLOCK)
        present = first + places < num_elements
        tl.store(area + places, tl.load(tensor + first + places, mask=present), mask=present)


@triton.jit
def add_parts(
    regions, index, places, present, like, SIZE: tl.constexpr, AREA: tl.constexpr,
    FLAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of all ranks' parts, ``[BLOCK]`` float32, added in the order of the ranks."""
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        area = area_of(regions, rank, index, like, AREA, FLAGS)
        # Other GPUs wrote these values, so this multiprocessor's cache may be stale.
        part = tl.load(area + places, mask=present, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


_NUMBERS = ["num_units", "num_blocks", "rank", "max_spins"]


@triton.jit(do_not_specialize=_NUMBERS)
def sum_in_one_pass(
    tensor,  # [num_units * UNIT], in place
    regions,  # [SIZE] int64: addresses of all ranks' regions
    calls,  # [PROGRAMS] int32: number of calls in which a program took part
    stop,  # [1] int32, in the host's memory
    num_units,  # the tensor has num_units * UNIT elements
    num_blocks,  # blocks of a program
    rank,  # this rank
    max_spins,  # a program waits for at most so many rounds
    SIZE: tl.constexpr,  # number of ranks
    LANES: tl.constexpr,  # SIZE rounded up to a power of two
    PROGRAMS: tl.constexpr,  # most programs of a call
    BLOCK: tl.constexpr,  # elements at once
    AREA: tl.constexpr,  # bytes of an area
    FLAGS: tl.constexpr,  # bytes of all flags
    UNIT: tl.constexpr,  # 16, so that a thread can load 16 bytes at once, or 1
):
    """Sum a tensor over all ranks; each rank reads the whole tensor of each rank."""
    num_elements, share = num_units * UNIT, num_blocks * BLOCK
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    index = program * 2 + (call & 1)
    first = program.to(tl.int64) * share
    own = area_of(regions, rank, index, tensor, AREA, FLAGS)
    copy_part(tensor, own, first, share, num_elements, BLOCK)
    meet(regions, program, call * 2 + 1, stop, rank, max_spins, SIZE, LANES)
    for start in range(0, share, BLOCK):
        places = start + tl.arange(0, BLOCK)
        present = first + places < num_elements
        total = add_parts(regions, index, places, present, tensor, SIZE, AREA, FLAGS, BLOCK)
        tl.store(tensor + first + places, total.to(tensor.dtype.element_ty), mask=present)
    tl.store(calls + program, call)


@triton.jit(do_not_specialize=_NUMBERS)
def sum_in_two_passes(
    tensor, regions, calls, stop, num_units, num_blocks, rank, max_spins, SIZE: tl.constexpr,
    LANES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, AREA: tl.constexpr,
    FLAGS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sum a tensor over all ranks; each rank adds a share, and reads the other ranks' shares.

    The arguments are those of `sum_in_one_pass`, but each rank adds ``num_blocks`` blocks of a
    program's share, which therefore has SIZE times as many.
    """
    num_elements, of_rank = num_units * UNIT, num_blocks * BLOCK
    share = SIZE * of_rank
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    index = program * 2 + (call & 1)
    first = program.to(tl.int64) * share
    own = area_of(regions, rank, index, tensor, AREA, FLAGS)
    copy_part(tensor, own, first, share, num_elements, BLOCK)
    meet(regions, program, call * 2 + 1, stop, rank, max_spins, SIZE, LANES)
    results = area_of(regions, rank, PROGRAMS * 2 + program, tensor, AREA, FLAGS)
    for start in range(0, of_rank, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        places = (rank * num_blocks) * BLOCK + offsets
        present = first + places < num_elements
        total = add_parts(regions, index, places, present, tensor, SIZE, AREA, FLAGS, BLOCK)
        tl.store(results + offsets, total.to(tensor.dtype.element_ty), mask=present)
    meet(regions, program, call * 2 + 2, stop, rank, max_spins, SIZE, LANES)
    for other in tl.static_range(SIZE):
        summed = area_of(regions, other, PROGRAMS * 2 + program, tensor, AREA, FLAGS)
        for start in range(0, of_rank, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            places = first + other * of_rank + offsets
            present = places < num_elements
            values = tl.load(summed + offsets, mask=present, cache_modifier=".cg")
            tl.store(tensor + places, values, mask=present)
    tl.store(calls + program, call)


@triton.jit(do_not_specialize=["row_units", *_NUMBERS])
def gather(
    tensor, gathered, regions, calls, stop, row_units, num_units, num_blocks, rank, max_spins,
    SIZE: tl.constexpr, LANES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    AREA: tl.constexpr, FLAGS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Copy the tensors of all ranks to the rows of ``gathered``, of ``row_units * UNIT`` elements.

    The other arguments are those of `sum_in_one_pass`.
    """
    num_elements, share = num_units * UNIT, num_blocks * BLOCK
    row_size = row_units.to(tl.int64) * UNIT
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    index = program * 2 + (call & 1)
    first = program.to(tl.int64) * share
    own = area_of(regions, rank, index, tensor, AREA, FLAGS)
    copy_part(tensor, own, first, share, num_elements, BLOCK)
    meet(regions, program, call * 2 + 1, stop, rank, max_spins, SIZE, LANES)
    for other in tl.static_range(SIZE):
        area = area_of(regions, other, index, tensor, AREA, FLAGS)
        for start in range(0, share, BLOCK):
            places = start + tl.arange(0, BLOCK)
            present = first + places < num_elements
            values = tl.load(area + places, mask=present, cache_modifier=".cg")
            to = gathered + other * row_size + first + places
            tl.store(to, values, mask=present)
    tl.store(calls + program, call)


@dataclass(frozen=True, slots=True)
class RegionShape:
    """Sizes of a rank's region; equal on all ranks.

    Attributes:
        num_ranks: number of ranks.
        num_programs: most programs of a call; all must run at one time on the GPU.
        block: elements that a program copies or adds at once.
        area_bytes: bytes of an area.
    """

    num_ranks: int
    num_programs: int = 64
    block: int = 2048
    area_bytes: int = 2**17

    @property
    def flags_bytes(self) -> int:
        """Return the size of all flags, rounded up to whole cache lines."""
        return -(-4 * self.num_programs * self.num_ranks // _LINE_BYTES) * _LINE_BYTES

    @property
    def num_bytes(self) -> int:
        """Return the size of a region."""
        return self.flags_bytes + 3 * self.num_programs * self.area_bytes

    def most_elements(self, itemsize: int, num_parts: int) -> int:
        """Return the most elements of one call whose programs each have ``num_parts`` parts."""
        part = num_parts * self.block
        return self.num_programs * (self.area_bytes // itemsize // part * part)

    def constants(self) -> dict[str, int]:
        """Return the kernels' constants."""
        return {
            "SIZE": self.num_ranks,
            "LANES": triton.next_power_of_2(self.num_ranks),
            "PROGRAMS": self.num_programs,
            "BLOCK": self.block,
            "AREA": self.area_bytes,
            "FLAGS": self.flags_bytes,
        }


class RankKernels:
    """The kernels of one rank, which launch on the current stream; all ranks make equal calls.

    Args:
        rank: this rank.
        shape: sizes of all regions.
        regions: addresses of the regions of all ranks, as this process maps them; all flags are 0.
        stop: ``[1]`` int32, 0, in pinned memory of the host if ``device`` is a GPU.
        device: the rank's device; the CPU with Triton's interpreter.
        max_spins: rounds after which a program gives up waiting, and sets ``stop``.
    """

    def __init__(
        self,
        rank: int,
        shape: RegionShape,
        regions: Sequence[int],
        stop: Tensor,
        device: torch.device,
        max_spins: int,
    ) -> None:
        assert shape.block * shape.num_ranks * 4 <= shape.area_bytes, "a block of each rank fits"
        self._shape, self._numbers = shape, (rank, max_spins)
        regions_there = torch.tensor(regions, dtype=torch.int64, device=device)
        calls = torch.zeros(shape.num_programs, dtype=torch.int32, device=device)
        self._shared = regions_there, calls, stop
        options = {**shape.constants(), "num_warps": _NUM_WARPS}
        self._launchers = {
            (kernel, unit): Launcher(kernel, **options, UNIT=unit)
            for kernel in (sum_in_one_pass, sum_in_two_passes, gather)
            for unit in (1, _UNIT)
        }
        self._bind = functools.lru_cache(NUM_KEPT)(self._make_launch)

    def sum(self, tensor: Tensor, *, in_two_passes: bool) -> None:
        """Sum a contiguous tensor over all ranks, in place, in as many calls as it needs."""
        kernel = sum_in_two_passes if in_two_passes else sum_in_one_pass
        num_parts = self._shape.num_ranks if in_two_passes else 1
        for piece in tensor.view(-1).split(self._shape.most_elements(tensor.itemsize, num_parts)):
            self._launch(kernel, (piece,), num_parts)

    def gather(self, tensor: Tensor, gathered: Tensor) -> None:
        """Copy the contiguous tensors of all ranks to ``gathered``, ``[ranks, ...]``."""
        bits = _BITS[tensor.itemsize]
        own, rows = tensor.view(-1).view(bits), gathered.view(self._shape.num_ranks, -1).view(bits)
        most = self._shape.most_elements(tensor.itemsize, 1)
        for piece, columns in zip(own.split(most), rows.split(most, 1), strict=True):
            self._launch(gather, (piece, columns), 1, own.numel())

    def _launch(
        self, kernel: object, tensors: tuple[Tensor, ...], num_parts: int, *row_sizes: int
    ) -> None:
        """Divide the first tensor among programs, each of ``num_parts`` parts, and launch."""
        num_elements, part = tensors[0].numel(), num_parts * self._shape.block
        num_blocks = -(-num_elements // (self._shape.num_programs * part))
        grid = (-(-num_elements // (num_blocks * part)),)
        sizes = *row_sizes, num_elements
        unit = 1 if any(size % _UNIT for size in sizes) else _UNIT
        numbers = *(size // unit for size in sizes), num_blocks, *self._numbers
        self._bind(kernel, unit, grid, numbers)(*tensors, *self._shared)

    def _make_launch(
        self, kernel: object, unit: int, grid: tuple[int, ...], numbers: tuple[int, ...]
    ) -> Launch:
        return Launch(self._launchers[kernel, unit], grid, numbers)


def _case(kernel: object, name: str, num_ranks: int, dtype: str, unit: int = _UNIT) -> AotCase:
    constants = {**RegionShape(num_ranks).constants(), "UNIT": unit}
    tensors = ("tensor", "gathered") if kernel is gather else ("tensor",)
    numbers = ["row_units", *_NUMBERS] if kernel is gather else _NUMBERS
    return AotCase(
        f"{name}, {num_ranks} ranks, {dtype}" + " odd" * (unit == 1),
        kernel,
        {
            **dict.fromkeys(tensors, f"*{dtype}"),
            "regions": "*i64",
            **dict.fromkeys(("calls", "stop"), "*i32"),
            **dict.fromkeys(numbers, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants,
        num_warps=_NUM_WARPS,
    )


AOT_CASES = (
    *(_case(sum_in_one_pass, "sum in one pass", size, "bf16") for size in (2, 4, 8)),
    _case(sum_in_one_pass, "sum in one pass", 2, "fp32"),
    _case(sum_in_one_pass, "sum in one pass", 2, "bf16", unit=1),
    *(_case(sum_in_two_passes, "sum in two passes", size, "bf16") for size in (2, 3, 8)),
    _case(gather, "gather", 2, "i16"),
)
