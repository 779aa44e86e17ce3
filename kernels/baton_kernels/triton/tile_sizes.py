"""Chooses tile sizes of the attention kernels for decodes and prompts.

The sizes depend on the head size and on a GPU's shared memory. They were chosen by the registers
and memory that the compiled code uses (``tools/compile_kernels.py``), not by measured times.
Refuses to know: kernels, steps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from baton_kernels.triton.attention_tile import PagedShape, TileSize, padded_side

# KiB of shared memory per program, by compute capability (CUDA C++ Programming Guide, table of
# technical specifications). Other capabilities from 8.0 on, such as 8.6, have 99.
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
LEAST_SHARED_KIB = 99

# All tables are by padded head size. With 5 stages, the next tile of keys and values is loaded
# while a program waits for the current tile (``cp.async.wait_group 3``); with 3 or 4 stages, the
# next tile is not loaded ahead.
_DECODE = {  # three programs per multiprocessor, with 72 KiB each
    16: TileSize(128, 4, 5),
    32: TileSize(128, 4, 5),
    64: TileSize(128, 4, 5),
    128: TileSize(64, 4, 5),
    256: TileSize(32, 4, 5),
    512: TileSize(16, 4, 5),
}
# Converting float8 keys takes registers, so fewer stages are used, to avoid register spills.
_DECODE_FP8 = _DECODE | {256: TileSize(32, 4, 4), 512: TileSize(16, 4, 4)}

# Rows of a tile: new tokens times heads.
_VARLEN_ROWS = {16: 128, 32: 128, 64: 128, 128: 128, 256: 64, 512: 32}
# With half the rows and 4 warps, two programs would share a multiprocessor (capability 9.0), but
# each key would be read twice as often, for which the L2 cache lacks bandwidth.
_VARLEN = {  # at most 130 KiB
    16: TileSize(128, 8, 5),
    32: TileSize(128, 8, 5),
    64: TileSize(128, 8, 5),
    128: TileSize(64, 8, 5),
    256: TileSize(32, 8, 5),  # 8 warps, because Triton 3.6 would spill registers with 4
    512: TileSize(16, 8, 5),
}
# At most 97 KiB, for GPUs with 99.
_VARLEN_SMALL = _VARLEN | {256: TileSize(32, 8, 3), 512: TileSize(16, 8, 3)}


@functools.cache
def shared_kib(device: torch.device) -> int:
    """Return a program's shared memory on this device, in KiB; without a GPU, the largest."""
    if device.type != "cuda":
        return max(SHARED_KIB.values())
    return SHARED_KIB.get(torch.cuda.get_device_capability(device), LEAST_SHARED_KIB)


def decode_tile(shape: PagedShape, element_size: int) -> TileSize:
    """Return the tile sizes for requests with one new token, which fit every device."""
    return _choose(_DECODE_FP8 if shape.is_fp8 else _DECODE, shape, element_size)


def varlen_tile(shape: PagedShape, element_size: int, shared_kib: int) -> TileSize:
    """Return the tile sizes for prompt chunks, with ``shared_kib`` of shared memory per program."""
    sizes = _VARLEN if shared_kib >= min(SHARED_KIB.values()) else _VARLEN_SMALL
    return _choose(sizes, shape, element_size)


def varlen_rows(shape: PagedShape, element_size: int) -> int:
    """Return the number of rows of a tile: new tokens times query heads of a KV head."""
    rows = _VARLEN_ROWS[shape.padded_head_dim] // (1 if element_size <= 2 else 4)
    return max(rows, padded_side(shape.group))


def _choose(sizes: Mapping[int, TileSize], shape: PagedShape, element_size: int) -> TileSize:
    """Choose the tile sizes for a head size; ``sizes`` is for elements of two bytes.

    Tiles for float32 are chosen to fit, not to be fast, because tensor cores would round float32.
    """
    size = sizes[shape.padded_head_dim]
    if element_size <= 2:
        return size
    return TileSize(max(16, size.tokens // 4), size.num_warps, 1 if shape.is_fp8 else 2)
