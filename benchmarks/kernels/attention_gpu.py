"""Compare the "triton" backend's paged attention on a GPU with the fastest libraries.

    decode     one query per request: library's time / ours, and KV bytes per second / a copy's
    prefill    2k to 16k new tokens, alone and after a cached prefix: TFLOP/s of both sides

These libraries get the keys and values of each request in contiguous memory, which is easier than
pages: torch's `scaled_dot_product_attention` (flash and cuDNN; in decodes, the query heads of a KV
head become its queries) and, where they can be imported, FlashAttention 2 and 3. FlashInfer, where
it can be imported, gets the same pages as our kernels. FlashInfer's first call compiles kernels
(with nvcc and ninja, unless `flashinfer_jit_cache` has them), which is not timed. The last lines
name the available and the missing libraries; a row says why a library refused. Consecutive calls
use different layers, so that keys and values are read from memory and not from a cache. `--dry-run`
runs everything on tiny shapes on a CPU through Triton's interpreter, and writes nothing.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.gpu_timing import (
    Row,
    copy_gb_per_s,
    excess_error,
    gb_per_s,
    interpret_without_gpu,
    median_us,
)

interpret_without_gpu()

# Importing torch.nn.attention imports Triton.
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from triton import TritonError  # noqa: E402

from baton_kernels.attention import ATTENTION_BACKENDS, wanted_block_size  # noqa: E402
from baton_kernels.attention.base import AttentionMetadata, AttentionOptions  # noqa: E402
from benchmarks.kernels.attention_steps import attention_step  # noqa: E402

Call = Callable[[], Tensor]
# Name -> module with flash_attn_func and flash_attn_with_kvcache. FlashAttention 3 has no release
# on the package index, so its wheel must be built separately.
FLASH_ATTENTIONS = {"FlashAttention 2": "flash_attn", "FlashAttention 3": "flash_attn_interface"}
FLASHINFER = "FlashInfer"
PEERS = {**FLASH_ATTENTIONS, FLASHINFER: "flashinfer"}
# FlashInfer merges the partial results of splits in this workspace; its documentation uses 128 MiB.
FLASHINFER_WORKSPACE_BYTES = 256 * 2**20
# Backends whose steps with prompts are timed; the first one gives the expected result.
STEP_BACKENDS = ("triton", "sdpa", "flash_attn", "flashinfer")
HEADS = ((16, 8), (32, 8), (40, 8), (32, 4))
BATCHES, CONTEXTS = (1, 8, 32, 64, 256), (1024, 4096, 16384)
PREFILLS = ((2048, 0), (4096, 0), (8192, 0), (16384, 0), (2048, 6144), (2048, 14336))
HEAD_DIM, BLOCK_SIZE = 128, 16
# Bytes that exceed an H200's cache of 60 MB, and the maximum number of bytes of a cell's keys and
# values.
COLD_BYTES, MOST_BYTES = 2**28, 40 * 2**30
# Kernel and library round weights and results to bfloat16, each time by up to 2^-9.
ATOL, RTOL = 2e-2, 2e-2


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape: ``batch`` requests of ``prefix`` cached and then ``query_len`` new tokens."""

    num_heads: int
    num_kv_heads: int
    batch: int
    query_len: int
    prefix: int
    head_dim: int = HEAD_DIM
    block_size: int = BLOCK_SIZE
    dtype: torch.dtype = torch.bfloat16

    @property
    def seq_len(self) -> int:
        return self.prefix + self.query_len

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one layer's keys and values."""
        elements = 2 * self.batch * self.seq_len * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def num_layers(self) -> int:
        """Return the number of layers that take turns, so that their KV exceeds any cache."""
        return min(max(math.ceil(COLD_BYTES / self.kv_bytes), 1), 64)

    @property
    def flops(self) -> float:
        """Return the floating-point operations of both products over the keys that queries see."""
        seen = self.query_len * self.prefix + self.query_len * (self.query_len + 1) / 2
        return 4.0 * self.batch * self.num_heads * self.head_dim * seen


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one layer in microseconds: our kernel's, and each library's."""

    ours: float
    theirs: dict[str, float]
    refusals: dict[str, str]  # library that refused the cell -> its reason


def measure_cell(cell: Cell, device: str) -> Measured:
    """Time our kernel, and each library that supports the cell; compare their results."""
    metadata = attention_step(cell.batch, cell.query_len, cell.seq_len, cell.block_size, device)
    table = metadata.block_table.long()
    shape = (2, cell.num_kv_heads, cell.block_size, cell.head_dim)
    # The cache is block-major: a block contains all layers.
    cache = torch.randn(table.numel(), cell.num_layers, *shape, device=device, dtype=cell.dtype)
    query = torch.randn(
        metadata.num_tokens, cell.num_heads, cell.head_dim, device=device, dtype=cell.dtype
    )
    backend = ATTENTION_BACKENDS.load("triton")()
    scale = cell.head_dim**-0.5

    def layer(kv_cache: Tensor) -> Call:
        return lambda: backend.run(query, kv_cache, metadata, AttentionOptions(scale=scale))

    backend.plan(metadata)
    found = layer(cache[:, 0])()
    ours = median_us([layer(kv_cache) for kv_cache in cache.unbind(1)], device)
    theirs: dict[str, float] = {}
    refusals: dict[str, str] = {}

    def measure_library(name: str, calls: list[Call]) -> None:
        try:
            expected = calls[0]()
            theirs[name] = median_us(calls, device)
        except (RuntimeError, ImportError, OSError) as error:
            # The library has no kernel for the shape, or cannot compile the kernel here.
            refusals[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return
        if (excess := excess_error(found, expected, ATOL, RTOL)) > 0:
            raise RuntimeError(f"differs from {name} by {excess:.3g} more than rounding explains")

    if FLASHINFER in peers()[0]:
        for name, use_tensor_cores in ((FLASHINFER, False), (f"{FLASHINFER} tensor cores", True)):
            if use_tensor_cores and cell.query_len > 1:
                continue  # FlashInfer's prefill always uses tensor cores
            run = _flashinfer(cell, metadata, table, device, use_tensor_cores)
            measure_library(name, [partial(run, query, kv) for kv in cache.unbind(1)])
    side_by_side = [_gathered(kv_cache, table, cell) for kv_cache in cache.unbind(1)]
    del cache
    for name, library in libraries(cell):
        measure_library(name, [partial(library, query, *kv) for kv in side_by_side])
    return Measured(ours, theirs, refusals)


def _gathered(kv_cache: Tensor, table: Tensor, cell: Cell) -> tuple[Tensor, Tensor]:
    """Gather the requests' keys and values, each ``[batch, num_kv_heads, seq_len, head_dim]``."""
    taken = kv_cache[table]  # [batch, blocks, 2, num_kv_heads, block_size, head_dim]
    key, value = taken.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : cell.seq_len]
    return key.contiguous(), value.contiguous()


# ------------------------------------------------------------------ the libraries


def libraries(cell: Cell) -> Iterator[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """Return the libraries' names and functions.

    The functions have the arguments query ``[num_tokens, num_heads, head_dim]``, key and value.
    """
    if torch.cuda.is_available():
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            yield f"sdpa {kernel.name.partition('_')[0].lower()}", _sdpa(cell, kernel)
    else:
        yield "sdpa", _sdpa(cell, SDPBackend.MATH)
    for name in peers()[0]:
        if name in FLASH_ATTENTIONS:
            yield name, _flash_attn(cell, FLASH_ATTENTIONS[name])


def peers() -> tuple[list[str], list[str]]:
    """Return the names of `PEERS` that can be imported here, and of those that cannot."""
    here = [name for name, module in PEERS.items() if importlib.util.find_spec(module) is not None]
    return here, [name for name in PEERS if name not in here]


def _sdpa(cell: Cell, kernel: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    group = cell.num_heads // cell.num_kv_heads

    def decode(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Query heads that share a KV head become queries of one head, so that each key is read only
        # once.
        folded = query.view(cell.batch, cell.num_kv_heads, group, cell.head_dim)
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(folded, key, value).reshape(query.shape)

    def prefill(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = (cell.batch, cell.query_len, cell.num_heads, cell.head_dim)
        by_head = query.view(shape).transpose(1, 2)
        mask = causal_lower_right(cell.query_len, cell.seq_len) if cell.prefix else None
        with sdpa_kernel(kernel):
            out = scaled_dot_product_attention(
                by_head, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        return out.transpose(1, 2).reshape(query.shape)

    return decode if cell.query_len == 1 else prefill


def _flash_attn(cell: Cell, module_name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    module = importlib.import_module(module_name)
    name = "flash_attn_with_kvcache" if cell.query_len == 1 else "flash_attn_func"
    call: Callable[..., Tensor | tuple[Tensor, ...]] = getattr(module, name)
    # The library's layout is [batch, seq_len, num_kv_heads, head_dim].
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.data_ptr() not in made:
            made[key.data_ptr()] = (
                key.transpose(1, 2).contiguous(),
                value.transpose(1, 2).contiguous(),
            )
        shape = (cell.batch, cell.query_len, cell.num_heads, cell.head_dim)
        found = call(query.view(shape), *made[key.data_ptr()], causal=True)
        out = found[0] if isinstance(found, tuple) else found  # some releases also return sums
        return out.reshape(query.shape)

    return run


def _flashinfer(
    cell: Cell, metadata: AttentionMetadata, table: Tensor, device: str, use_tensor_cores: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return FlashInfer's function of query and pages; its first call makes the step's plan.

    An engine would also plan once per step. The layout "HND" equals ours, ``[num_blocks, 2,
    num_kv_heads, block_size, head_dim]``; blocks may be scattered in memory.
    """

    @cache
    def plan() -> Callable[[Tensor, Tensor], Tensor]:
        flashinfer = importlib.import_module(PEERS[FLASHINFER])
        workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        blocks = table.shape[1]
        starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device)
        last_page_len = cell.seq_len - (blocks - 1) * cell.block_size
        pages = (
            starts * blocks,
            table.flatten().to(torch.int32),
            torch.full((cell.batch,), last_page_len, dtype=torch.int32, device=device),
        )
        sizes = (cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.block_size)
        types = {"q_data_type": cell.dtype, "kv_data_type": cell.dtype}
        if cell.query_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=use_tensor_cores
            )
            wrapper.plan(*pages, *sizes, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            wrapper.plan(metadata.query_start_loc, *pages, *sizes, causal=True, **types)
        run: Callable[[Tensor, Tensor], Tensor] = wrapper.run
        return run

    return lambda query, kv_cache: plan()(query, kv_cache)


# ------------------------------------------------------------------ the two parts


def decode_cells(device: str) -> Iterator[Cell]:
    """Yield all decode cells that fit into memory; on a CPU two tiny cells."""
    if torch.device(device).type == "cpu":
        yield Cell(4, 2, 1, 1, 6, 16, 4, torch.float32)
        yield Cell(2, 1, 3, 1, 9, 16, 4, torch.float32)
        return
    for num_heads, num_kv_heads in HEADS:
        for batch in BATCHES:
            for context in CONTEXTS:
                cell = Cell(num_heads, num_kv_heads, batch, 1, context - 1)
                # memory holds the KV three times: paged, contiguous, and as a copy
                if cell.kv_bytes * 3 <= MOST_BYTES:
                    yield cell


def prefill_cells(device: str) -> Iterator[Cell]:
    """Yield the prefill cells; on a CPU two tiny cells."""
    if torch.device(device).type == "cpu":
        yield Cell(2, 1, 1, 5, 0, 16, 4, torch.float32)
        yield Cell(2, 1, 1, 3, 6, 16, 4, torch.float32)
        return
    for query_len, prefix in PREFILLS:
        yield Cell(32, 8, 1, query_len, prefix)


@torch.inference_mode()
def measure(device: str) -> Iterator[Row]:
    """Yield rows as they are measured, prefills first; on a CPU, rows of tiny shapes.

    If a cell fails, its row has the key "failed", and the other cells still run.
    """
    yield from measure_cells(device, (*prefill_cells(device), *decode_cells(device)))


@torch.inference_mode()
def measure_cells(device: str, cells: Iterable[Cell]) -> Iterator[Row]:
    """Yield a row per cell as it is measured; if a cell fails, its row has the key "failed"."""
    copied = copy_gb_per_s(device, 2**20 if torch.device(device).type == "cpu" else 2**29)
    for cell in cells:
        heads = f"{cell.num_heads}/{cell.num_kv_heads}"
        what = f"decode {heads}, batch {cell.batch}, context {cell.seq_len}"
        if cell.query_len > 1:
            what = f"prefill {cell.query_len} behind {cell.prefix}"
        try:
            found = measure_cell(cell, device)
        except (RuntimeError, TritonError) as error:
            yield {"what": what, "failed": str(error)}
            continue
        row = _row(what, found.ours, found.theirs)
        if cell.query_len > 1:
            row["TFLOP/s"] = round(cell.flops / found.ours / 1e6, 1)
        else:
            row["of copy"] = round(gb_per_s(cell.kv_bytes, found.ours) / copied, 2)
        if found.refusals:
            row["refused"] = "; ".join(f"{name}: {why}" for name, why in found.refusals.items())
        yield row


@torch.inference_mode()
def measure_steps(device: str) -> Iterator[Row]:
    """Yield the times of each backend for steps with a prompt, including gathering blocks.

    From these rows, `tools/attention_table.py` makes the table that decides which backend computes
    prompts. A backend that cannot run here has no time in the row.
    """
    for cell in step_cells(device):
        row: Row = {"part": "step", "what": step_name(cell)}
        expected: Tensor | None = None
        for name in STEP_BACKENDS:
            try:
                out, us = _time_step(name, cell, device)
            except (RuntimeError, ImportError, OSError, AssertionError, TritonError) as error:
                row[f"{name} refused"] = f"{type(error).__name__}: {str(error)[:80]}"
                continue
            expected = out if expected is None else expected
            if (excess := excess_error(out, expected, ATOL, RTOL)) > 0:
                row["failed"] = f"{name} differs from {STEP_BACKENDS[0]} by {excess:.3g} too much"
            row[name] = round(us, 2)
        yield row


def step_cells(device: str) -> Iterator[Cell]:
    """Yield cells with prompts, for 1, 2, 4 and 8 query heads per KV head; a CPU: one tiny cell."""
    if torch.device(device).type == "cpu":
        yield Cell(4, 2, 1, 5, 6, 64, 16, torch.float32)
        return
    for num_heads, num_kv_heads in ((16, 16), (16, 8), (32, 8), (32, 4)):
        for query_len, prefix in ((128, 0), (512, 0), (2048, 0), (8192, 0), (512, 7680)):
            yield Cell(num_heads, num_kv_heads, 1, query_len, prefix)


def step_name(cell: Cell) -> str:
    """Return a step's name, from which `tools/attention_table.py` reads the sizes."""
    heads = f"{cell.num_heads}/{cell.num_kv_heads} x {cell.head_dim}"
    return f"{heads}, {cell.query_len} of {cell.seq_len}"


def _time_step(name: str, cell: Cell, device: str) -> tuple[Tensor, float]:
    """Run one backend on one layer after another; return its result, and us per layer."""
    block_size = wanted_block_size(name) or cell.block_size
    metadata = attention_step(cell.batch, cell.query_len, cell.seq_len, block_size, device)
    blocks = metadata.block_table.numel()
    torch.manual_seed(0)  # all backends get the same values, whatever their block size
    shape = (cell.num_layers, 2, cell.num_kv_heads, cell.seq_len, cell.head_dim)
    tokens = torch.randn(shape, device=device, dtype=cell.dtype)
    cache = torch.zeros(
        blocks, cell.num_layers, 2, cell.num_kv_heads, block_size, cell.head_dim,
        device=device, dtype=cell.dtype,
    )  # fmt: skip
    for at, block in enumerate(metadata.block_table[0].tolist()):
        part = tokens[:, :, :, at * block_size : (at + 1) * block_size]
        cache[block, :, :, :, : part.shape[3]] = part
    query = torch.randn(
        metadata.num_tokens, cell.num_heads, cell.head_dim, device=device, dtype=cell.dtype
    )
    backend = ATTENTION_BACKENDS.load(name)()
    backend.plan(metadata)
    options = AttentionOptions(scale=cell.head_dim**-0.5)
    calls = [partial(backend.run, query, kv, metadata, options) for kv in cache.unbind(1)]
    return calls[0](), median_us(calls, device)


def _row(what: str, ours: float, theirs: dict[str, float]) -> Row:
    name = min(theirs, key=theirs.__getitem__, default="none")
    best = theirs.get(name, math.nan)
    return {
        "what": what, "us": round(ours, 2), "best library": name, "its us": round(best, 2),
        "library / ours": round(best / ours, 2),
    }  # fmt: skip


def geometric_mean(rows: list[Row]) -> float:
    """Return the geometric mean of the best library's time / our time, over all decode rows."""
    decodes = (row for row in rows if str(row["what"]).startswith("decode"))
    ratios = [row.get("library / ours") for row in decodes]
    known = [ratio for ratio in ratios if isinstance(ratio, float) and ratio > 0]
    return round(math.exp(sum(map(math.log, known)) / len(known)), 3) if known else math.nan
