"""Measure Triton kernels on a GPU: small kernels, attention, and products with few-bit weights.

    stream     256 MB and more: norm, norm + rotary + store, SwiGLU, block moves / copy bandwidth
    launch     a step of 64 or 256 tokens in a CUDA graph: unfused torch ops / one kernel
    sampling   64 and 256 rows of 151,936 logits: torch (sorts to filter) / our three kernels

Small kernels are compared with the copy bandwidth and with chains of torch ops, attention with
libraries (`attention_gpu.py`), and products with the GPU vendor's products (`quantized_gpu.py`).
Before timing, each kernel's result is compared with its definition. A failing part does not stop
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels import attention_gpu, quantized_gpu
from benchmarks.kernels.gpu_timing import (
    Row,
    copy_gb_per_s,
    device_of,
    excess_error,
    gb_per_s,
    interpret_without_gpu,
    median_us,
    num_bytes,
)
from benchmarks.runner.run import Run

interpret_without_gpu()

from triton import TritonError  # noqa: E402

from baton_kernels import reference  # noqa: E402
from baton_kernels.triton.norm import add_rms_norm  # noqa: E402
from baton_kernels.triton.norm_rotary_store import norm_rotary_store  # noqa: E402
from baton_kernels.triton.sampling.tokens import sample_tokens  # noqa: E402
from baton_kernels.triton.silu_mul import silu_mul  # noqa: E402

FILES = {"small": "kernels_gpu", "attention": "attention_gpu", "products": "quantized_gpu"}
# The definition rounds to bfloat16 after the norm, the products and the sum, each time by up to
# 2^-9.
ATOL, RTOL = 6e-2, 2e-2


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model like Qwen3-8B, or tiny sizes for the dry run."""

    device: str
    dtype: torch.dtype
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    vocab_size: int = 151_936
    stream_bytes: int = 2**28
    step_tokens: tuple[int, ...] = (64, 256)
    sampling_rows: tuple[int, ...] = (64, 256)

    @classmethod
    def of(cls, device: str) -> Sizes:
        """Return sizes for a device; a CPU gets tiny sizes, and a dtype that Triton interprets."""
        if torch.device(device).type != "cpu":
            return cls(device, torch.bfloat16)
        return cls(device, torch.float32, 32, 48, 2, 1, 16, 4, 300, 2**12, (3,), (2,))

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Step:
    """The tensors that one layer uses in one step."""

    delta: Tensor  # [num_tokens, hidden_size]
    residual: Tensor
    weight: Tensor  # [hidden_size]
    qkv: Tensor  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    cos: Tensor  # [num_tokens, head_dim]
    sin: Tensor
    head_weight: Tensor  # [head_dim]
    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    slots: Tensor  # [num_tokens]
    gate_up: Tensor  # [num_tokens, 2 * intermediate_size]

    @classmethod
    def of(cls, sizes: Sizes, num_tokens: int) -> Step:
        heads = sizes.num_heads + 2 * sizes.num_kv_heads
        num_blocks = -(-num_tokens // sizes.block_size) + 1
        layer = (2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
        angles = torch.rand(num_tokens, sizes.head_dim // 2, device=sizes.device).repeat(1, 2)
        slots = torch.randperm(num_blocks * sizes.block_size, device=sizes.device)[:num_tokens]
        return cls(
            delta=sizes.random(num_tokens, sizes.hidden_size),
            residual=sizes.random(num_tokens, sizes.hidden_size),
            weight=sizes.random(sizes.hidden_size),
            qkv=sizes.random(num_tokens, heads * sizes.head_dim),
            cos=angles.cos().to(sizes.dtype),
            sin=angles.sin().to(sizes.dtype),
            head_weight=sizes.random(sizes.head_dim),
            kv_cache=torch.zeros(num_blocks, *layer, dtype=sizes.dtype, device=sizes.device),
            slots=slots,
            gate_up=sizes.random(num_tokens, 2 * sizes.intermediate_size),
        )


def kernels_of(step: Step, sizes: Sizes) -> dict[str, tuple[Callable[[], object], int]]:
    """Return each op as one kernel launch, and the bytes that it must read and write."""
    heads = (sizes.num_heads, step.cos, step.sin, step.kv_cache, step.slots)
    weight = step.head_weight
    return {
        "add_rms_norm": (
            lambda: add_rms_norm(step.delta, step.residual, step.weight, 1e-6),
            4 * num_bytes(step.delta),
        ),
        "norm_rotary_store": (
            lambda: norm_rotary_store(
                step.qkv, *heads, query_weight=weight, key_weight=weight, eps=1e-6
            ),
            2 * num_bytes(step.qkv) + num_bytes(step.cos, step.sin, step.slots),
        ),
        "silu_mul": (lambda: silu_mul(step.gate_up), num_bytes(step.gate_up) * 3 // 2),
    }


def torch_chains_of(step: Step, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Return each op as a chain of torch calls without a synchronization."""
    block_size = sizes.block_size

    def chain() -> Tensor:
        heads = step.qkv.view(len(step.qkv), -1, sizes.head_dim)
        query, value = heads[:, : sizes.num_heads], heads[:, -sizes.num_kv_heads :]
        key = heads[:, sizes.num_heads : -sizes.num_kv_heads]
        query, key = (
            functional.rms_norm(x, (sizes.head_dim,), step.head_weight, 1e-6) for x in (query, key)
        )
        query, key = reference.rotary(query, key, step.cos, step.sin)
        by_slot = step.kv_cache.transpose(2, 3)
        blocks, offsets = step.slots // block_size, step.slots % block_size
        by_slot[:, 0][blocks, offsets] = key
        by_slot[:, 1][blocks, offsets] = value
        return query

    def add_norm() -> tuple[Tensor, Tensor]:
        total = step.residual + step.delta
        return functional.rms_norm(total, (sizes.hidden_size,), step.weight, 1e-6), total

    return {
        "add_rms_norm": add_norm,
        "norm_rotary_store": chain,
        "silu_mul": lambda: reference.silu_mul(step.gate_up),
    }


# ------------------------------------------------------------------ the three parts


def stream(sizes: Sizes) -> Iterator[Row]:
    """Measure each op's bytes per second with uncached inputs, and those of a copy."""
    copied = copy_gb_per_s(sizes.device, 2 * sizes.stream_bytes)
    yield {"part": "stream", "what": "copy", "GB/s": copied, "of copy": 1.0}
    width = max(sizes.hidden_size, sizes.intermediate_size // 3)
    num_tokens = sizes.stream_bytes // (width * sizes.dtype.itemsize)
    step = Step.of(sizes, num_tokens)
    for name, (call, moved) in kernels_of(step, sizes).items():
        found = gb_per_s(moved, median_us([call], sizes.device))
        yield {"part": "stream", "what": name, "GB/s": found, "of copy": found / copied}


def launch(sizes: Sizes) -> Iterator[Row]:
    """Measure the microseconds of a step's ops in a CUDA graph: as torch ops and as one kernel."""
    for num_tokens in sizes.step_tokens:
        step = Step.of(sizes, num_tokens)
        chains = torch_chains_of(step, sizes)
        for name, (kernel, _) in kernels_of(step, sizes).items():
            _check(name, kernel(), chains[name]())
            ours, theirs = (median_us([x] * 20, sizes.device) for x in (kernel, chains[name]))
            yield {
                "part": "launch", "what": f"{name}, {num_tokens} tokens", "us": ours,
                "torch us": theirs, "torch / ours": theirs / ours,
            }  # fmt: skip


def _check(name: str, found: object, expected: object) -> None:
    """Raise RuntimeError if a result differs by more than rounding to 16 bits explains."""
    for a, b in zip(_tensors(found), _tensors(expected), strict=True):
        if (excess := excess_error(a, b, ATOL, RTOL)) > 0:
            raise RuntimeError(f"{name}: differs by {excess:.3g} more than rounding explains")


def _tensors(value: object) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    assert isinstance(value, tuple)
    return value


def sampling(sizes: Sizes) -> Iterator[Row]:
    """Measure the us to sample a token per row, also as a multiple of reading the logits once."""
    copied = copy_gb_per_s(sizes.device, 2 * sizes.stream_bytes)
    for num_rows in sizes.sampling_rows:
        # The logits are peaked like a model's: some hundred tokens have nearly all the probability.
        logits = sizes.random(num_rows, sizes.vocab_size, dtype=torch.float32)
        ways = {
            "greedy": (0.0, 0, 1.0, logits),
            "temperature": (1.0, 0, 1.0, logits),
            "top-k 50": (1.0, 50, 1.0, logits),
            "top-p 0.9": (1.0, 0, 0.9, logits * 3),
            "top-p 0.9, flat": (1.0, 0, 0.9, logits),
            "top-k 50, top-p 0.9": (1.0, 50, 0.9, logits),
        }
        for name, (temperature, top_k, top_p, values) in ways.items():
            call = _sampler(values, temperature, top_k, top_p)
            ours = median_us([call] * 5, sizes.device)
            theirs = median_us([_in_torch(values, temperature, top_k, top_p)], sizes.device)
            floor = num_bytes(values) / copied / 1e3
            yield {
                "part": "sampling", "what": f"{name}, {num_rows} rows", "us": ours,
                "torch us": theirs, "torch / ours": theirs / ours, "reads": ours / floor,
            }  # fmt: skip


def _sampler(values: Tensor, temperature: float, top_k: int, top_p: float) -> Callable[[], Tensor]:
    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((len(values),), value, dtype=dtype, device=values.device)

    keys = torch.randint(0, 2**31, (len(values), 2), dtype=torch.int32, device=values.device)
    arguments = (
        column(temperature, torch.float32), column(top_k, torch.int32),
        column(top_p, torch.float32), column(0, torch.float32), keys,
    )  # fmt: skip
    return lambda: sample_tokens(values, *arguments)


def _in_torch(values: Tensor, temperature: float, top_k: int, top_p: float) -> Callable[[], Tensor]:
    """Sample with usual torch ops: sort (if needed), cut, softmax, divide by exponentials."""
    if temperature == 0:
        return lambda: values.argmax(dim=-1)
    if not top_k and top_p >= 1:
        return lambda: (values.softmax(dim=-1) / torch.empty_like(values).exponential_()).argmax(-1)

    def draw() -> Tensor:
        ordered, token_ids = values.sort(dim=-1, descending=True)
        weights = ordered.softmax(dim=-1)
        if top_k:
            weights[:, top_k:] = 0
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.masked_fill(weights.cumsum(dim=-1) - weights >= top_p, 0)
        race = weights / torch.empty_like(weights).exponential_()
        return token_ids.gather(1, race.argmax(dim=-1, keepdim=True)).squeeze(1)

    return draw


PARTS: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    "stream": stream,
    "launch": launch,
    "sampling": sampling,
}


@torch.inference_mode()
def measure(device: str, parts: tuple[str, ...] = tuple(PARTS)) -> Iterator[Row]:
    """Yield rows as they are measured; on a CPU, for tiny shapes, whose times mean nothing.

    A failure ends its part, and yields a row with the key "failed".
    """
    sizes = Sizes.of(device)
    for part in parts:
        try:
            for row in PARTS[part](sizes):
                yield {k: v if isinstance(v, str) else round(v, 2) for k, v in row.items()}
        except (RuntimeError, TritonError) as error:
            yield {"part": part, "what": "the rest", "failed": str(error)}


def run(
    run: Run,
    groups: Sequence[Literal["small", "attention", "products"]] = (
        "small",
        "attention",
        "products",
    ),
    parts: Sequence[Literal["stream", "launch", "sampling"]] = ("stream", "launch", "sampling"),
    dry_run: bool = False,
) -> None:
    """Measure groups of kernels; each group has its own file of results.

    Args:
        parts: which parts of the group "small" to measure.
        dry_run: whether to run tiny shapes on the CPU, without saving.
    """
    device = device_of(run, is_dry=dry_run)
    for group in groups:
        more: dict[str, object] = {}
        if group == "small":
            rows = list(measure(device, tuple(parts)))
        elif group == "attention":
            rows = list(attention_gpu.measure(device))
            more["peers"] = dict(zip(("here", "missing"), attention_gpu.peers(), strict=True))
            run.show("decode, library / ours, geometric mean", attention_gpu.geometric_mean(rows))
        else:
            rows = list(quantized_gpu.measure(device))
        run.show(group, rows)
        run.problems += [str(row) for row in rows if "failed" in row]
        if device != "cpu":
            run.save({**more, "rows": rows}, FILES[group])
