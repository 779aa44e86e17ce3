"""Compare CPU kernels: paged attention with memory bandwidth, linear layers with torch's.

The attention of whole prompts is compared with linear layers of the same model, because matrix
products limit the speed of both.

Matrix products can also limit the attention of many heads over latents (MLA). So the time of this
attention is compared with plain reads, and also with the longer of plain reads and a large product
in torch.

Both sides of a comparison take turns in one run with the given threads, so that a busy machine
slows both. Repetitions use different memory (another layer of the KV cache, another copy of a
weight), as a model does, so that only the CPU's last cache level can help. Refuses to know: models,
requests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import baton_kernels as ops
from baton.kv.layers import LatentKV, PagedKV
from baton_kernels.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    as_keys_and_values,
)
from baton_kernels.attention.cpu import CpuAttention
from baton_kernels.attention.native import NativeAttention
from baton_kernels.dispatch import native_ops
from baton_kernels.huge_pages import WeightMemory
from benchmarks.kernels.attention_steps import attention_step
from benchmarks.runner.run import Document, Run
from engine.worker.kv_cache import allocate_kv_cache, kv_cache_spec

CONTEXT = 2048
BATCHES = (1, 8, 32)
HEADS = ((8, 2, 64), (8, 4, 128))  # query heads, KV heads, head dim
BLOCK_SIZE = 16
NUM_LAYERS = 6
LATENT_CONTEXT = 4096
LATENT_RANK, LATENT_WIDTH = (
    512,
    512 + 64,
)  # latent values per token; the same with the values for positions
LATENT_HEADS = (16, 128)  # DeepSeek V2 Lite, V3
LATENT_BATCHES = (1, 8)
LATENT_BLOCK_SIZE = 64
PROMPTS = (4096, 8192, 16384)  # tokens
PROMPT_HEADS = (16, 8, 128)  # Qwen3-0.6B's query heads, KV heads, head dim
PROMPT_LAYERS = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))  # in, out
PROMPT_ROWS = 2048  # rows of a step
LONG_CONTEXTS = ((4096, 8), (16384, 2))  # tokens, requests
ROWS = (1, 4, 8, 16, 32, 512)
SHAPES = ((768, 4096), (2048, 768), (768, 32768))  # in, out

Subject = Callable[[int], object]  # its argument is the number of the repetition


def take_turns(subjects: Mapping[str, Subject], repetitions: int) -> dict[str, float]:
    """Call the functions in turns; return the lower quartile of each function's seconds.

    Other processes only add time, so the lower quartile is nearer to the true time than the mean.
    """
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for repetition in range(-1, repetitions):
        for name, subject in subjects.items():
            start = time.perf_counter()
            subject(repetition % NUM_LAYERS)
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in seconds.items()}


def make_cache(
    layer: PagedKV | LatentKV,
    num_layers: int,
    block_size: int,
    num_blocks: int,
    dtypes: Sequence[torch.dtype],
) -> Tensor:
    """Make a KV cache with random values.

    Args:
        dtypes: the dtype of the cache, and the dtype of the computation.
    """
    spec = kv_cache_spec([layer] * num_layers, block_size, dtypes[0], compute_dtype=dtypes[1])
    cache = allocate_kv_cache(spec, num_blocks, torch.device("cpu"))
    for block in cache:
        block.copy_(torch.randn(block.shape))
    return cache


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read(memory: Tensor, layer: int) -> object:
    """Read all bytes of a layer once, in order."""
    return memory[layer].sum()


def attend(
    backend: AttentionBackend, query: Tensor, cache: Tensor, step: AttentionMetadata, layer: int
) -> object:
    """Compute one layer's attention."""
    return backend.run(
        query, cache[:, layer], step, AttentionOptions(scale=query.shape[-1] ** -0.5)
    )


def attend_latents(
    backend: AttentionBackend, query: Tensor, cache: Tensor, step: AttentionMetadata, layer: int
) -> object:
    """Compute one layer's attention over latents."""
    keys = as_keys_and_values(cache[:, layer])
    return backend.run(
        query, keys, step, AttentionOptions(scale=LATENT_WIDTH**-0.5, value_dim=LATENT_RANK)
    )


def multiply(x: Tensor, weights: Tensor, copy: int) -> object:
    """Multiply ``x`` by the copy of a weight with this number."""
    return functional.linear(x, weights[copy])


def multiply_packed(x: Tensor, weights: Sequence[ops.PackedWeight], copy: int) -> object:
    """Multiply ``x`` by the copy of a packed weight with this number."""
    return ops.packed_linear(x, weights[copy])


def multiply_all(x: Sequence[Tensor], weights: Sequence[ops.PackedWeight], _copy: int) -> object:
    """Compute several layers with packed weights, each with its own input."""
    return [ops.packed_linear(row, weight) for row, weight in zip(x, weights, strict=True)]


def measure_attention(
    dtype: torch.dtype,
    heads: Sequence[tuple[int, int, int]],
    sizes: Sequence[tuple[int, int]],
    repetitions: int,
    cache_dtype: torch.dtype | None = None,
) -> list[dict[str, object]]:
    """Measure paged decode attention beside torch's backend and plain reads of the same bytes."""
    cache_dtype = cache_dtype or dtype
    rows: list[dict[str, object]] = []
    for num_heads, num_kv_heads, head_dim in heads:
        for context, batch in sizes:
            step = attention_step(batch, 1, context, BLOCK_SIZE)
            num_blocks = batch * context // BLOCK_SIZE
            layer, dtypes = PagedKV(num_kv_heads, head_dim), (cache_dtype, dtype)
            cache = make_cache(layer, NUM_LAYERS, BLOCK_SIZE, num_blocks, dtypes)
            query = torch.randn(batch, num_heads, head_dim).to(dtype)
            flat = torch.randn(NUM_LAYERS, cache.nbytes // 4 // NUM_LAYERS)
            subjects: dict[str, Subject] = {"read": partial(read, flat)}
            backends: dict[str, AttentionBackend] = {
                "native": NativeAttention(),
                "torch": CpuAttention(),
            }
            for name, backend in backends.items():
                backend.plan(step)
                subjects[name] = partial(attend, backend, query, cache, step)
            seconds = take_turns(subjects, repetitions)
            gigabytes = flat[0].numel() * flat.itemsize / 1e9
            rows.append(
                {
                    "dtype": name_of(dtype),
                    "cache": name_of(cache_dtype),
                    "heads": f"{num_heads}/{num_kv_heads} x {head_dim}",
                    "context": context,
                    "batch": batch,
                    **{f"{name}_ms": round(1e3 * taken, 3) for name, taken in seconds.items()},
                    "read_gb_s": round(gigabytes / seconds["read"], 2),
                    "native_gb_s": round(gigabytes / seconds["native"], 2),
                    "share_of_bandwidth": round(seconds["read"] / seconds["native"], 3),
                    "times_torch": round(seconds["torch"] / seconds["native"], 2),
                }
            )
    return rows


def measure_prompts(repetitions: int) -> list[dict[str, object]]:
    """Measure a prompt's attention and a step's linear layers, both in GFLOP/s."""
    rows: list[dict[str, object]] = []
    num_heads, num_kv_heads, head_dim = PROMPT_HEADS
    native = native_ops()
    assert native is not None, "no native kernels: see the log"
    memory = WeightMemory()
    for dtype, format_ in (
        (torch.float32, ops.WeightFormat.FP32),
        (torch.bfloat16, ops.WeightFormat.BF16),
    ):
        weights = [
            ops.PackedWeight.pack(
                torch.randn(width, depth), None, format_, native.panel_width, memory.empty
            )
            for depth, width in PROMPT_LAYERS
        ]
        inputs = [torch.randn(PROMPT_ROWS, depth).to(dtype) for depth, _ in PROMPT_LAYERS]
        linear_work = 2e-9 * PROMPT_ROWS * sum(depth * width for depth, width in PROMPT_LAYERS)
        for length in PROMPTS:
            step = attention_step(1, length, length, BLOCK_SIZE)
            layer, num_blocks = PagedKV(num_kv_heads, head_dim), length // BLOCK_SIZE
            cache = make_cache(layer, 1, BLOCK_SIZE, num_blocks, (dtype, dtype))
            # The cache has one layer in memory, which stands for all layers of the model.
            cache = cache.expand(-1, NUM_LAYERS, -1, -1, -1, -1)
            query = torch.randn(length, num_heads, head_dim).to(dtype)
            backend = NativeAttention()
            backend.plan(step)
            subjects: dict[str, Subject] = {
                "attention": partial(attend, backend, query, cache, step),
                "linear": partial(multiply_all, inputs, weights),
            }
            seconds = take_turns(subjects, repetitions)
            work = 2e-9 * num_heads * head_dim * length * (length + 1)
            attention, linear = work / seconds["attention"], linear_work / seconds["linear"]
            rows.append(
                {
                    "dtype": name_of(dtype),
                    "tokens": length,
                    "attention_gflop_s": round(attention, 1),
                    "linear_gflop_s": round(linear, 1),
                    "share_of_linear": round(attention / linear, 3),
                }
            )
    return rows


def measure_latents(repetitions: int) -> list[dict[str, object]]:
    """Compare paged decode attention over latents with memory reads and with a large product."""
    rows: list[dict[str, object]] = []
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.randn(1, 1024, 1024).to(dtype)
        for num_heads in LATENT_HEADS:
            for batch in LATENT_BATCHES:
                step = attention_step(batch, 1, LATENT_CONTEXT, LATENT_BLOCK_SIZE)
                num_blocks = batch * LATENT_CONTEXT // LATENT_BLOCK_SIZE
                layer, dtypes = LatentKV(LATENT_WIDTH), (dtype, dtype)
                cache = make_cache(layer, NUM_LAYERS, LATENT_BLOCK_SIZE, num_blocks, dtypes)
                query = torch.randn(batch, num_heads, LATENT_WIDTH).to(dtype)
                flat = torch.randn(NUM_LAYERS, cache.nbytes // 4 // NUM_LAYERS)
                backend = NativeAttention()
                backend.plan(step)
                subjects: dict[str, Subject] = {
                    "read": partial(read, flat),
                    "native": partial(attend_latents, backend, query, cache, step),
                    "product": lambda _, square=square: multiply(square[0], square, 0),  # type: ignore[misc]
                }
                seconds = take_turns(subjects, repetitions)
                work = 2e-9 * batch * num_heads * LATENT_CONTEXT * (LATENT_WIDTH + LATENT_RANK)
                product_gflop_s = 2 * 1.024**3 / seconds["product"]
                limit_s = max(seconds["read"], work / product_gflop_s)
                rows.append(
                    {
                        "dtype": name_of(dtype),
                        "heads": num_heads,
                        "batch": batch,
                        "read_ms": round(1e3 * seconds["read"], 3),
                        "native_ms": round(1e3 * seconds["native"], 3),
                        "read_gb_s": round(flat[0].nbytes / 1e9 / seconds["read"], 2),
                        "native_gflop_s": round(work / seconds["native"], 1),
                        "product_gflop_s": round(product_gflop_s, 1),
                        "share_of_bandwidth": round(seconds["read"] / seconds["native"], 3),
                        "share_of_products": round(work / seconds["native"] / product_gflop_s, 3),
                        "share_of_limit": round(limit_s / seconds["native"], 3),
                    }
                )
    return rows


def measure_linear(repetitions: int) -> list[dict[str, object]]:
    """Compare packed weights in each storage type with F.linear in float32."""
    rows: list[dict[str, object]] = []
    native = native_ops()
    assert native is not None, "no native kernels: see the log"
    memory = WeightMemory()
    for in_features, out_features in SHAPES:
        weights = torch.randn(NUM_LAYERS, out_features, in_features)
        packed = {
            format_.value: [
                ops.PackedWeight.pack(weight, None, format_, native.panel_width, memory.empty)
                for weight in weights
            ]
            for format_ in ops.WeightFormat
        }
        for num_rows in ROWS:
            x = torch.randn(num_rows, in_features)
            subjects: dict[str, Subject] = {"F.linear": partial(multiply, x, weights)}
            for name, copies in packed.items():
                subjects[name] = partial(multiply_packed, x, copies)
            seconds = take_turns(subjects, repetitions)
            torchs = seconds["F.linear"]
            rows.append(
                {
                    "in_features": in_features,
                    "out_features": out_features,
                    "rows": num_rows,
                    **{f"{name}_us": round(1e6 * taken, 1) for name, taken in seconds.items()},
                    **{f"{name}_times": round(torchs / seconds[name], 2) for name in packed},
                }
            )
    return rows


def run(run: Run, threads: int = 2, repetitions: int = 24) -> None:
    """Measure attention and linear layers."""
    torch.set_num_threads(threads)
    short = [(CONTEXT, batch) for batch in BATCHES]
    attention = [
        *measure_attention(torch.float32, HEADS, short, repetitions),
        *(
            row
            for cache in (torch.bfloat16, ops.FP8)
            for row in measure_attention(
                *(torch.bfloat16, [PROMPT_HEADS], LONG_CONTEXTS, repetitions), cache
            )
        ),
    ]
    parts = {
        "attention": attention,
        "prompt_attention": measure_prompts(max(3, repetitions // 4)),
        "latent_attention": measure_latents(repetitions),
        "linear": measure_linear(repetitions),
    }
    for name, rows in parts.items():
        run.show(name, rows)
    document: Document = {"num_threads": threads, "repetitions": repetitions, **parts}
    run.judge(document, "kernels_cpu")
    run.save(document, "kernels_cpu")
