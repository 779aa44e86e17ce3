"""Paged attention with FlashInfer, which reads Baton's KV cache without a copy ("HND" pages).

The library plans on the host and keeps a plan in a wrapper object, so layers with different options
(windows, caps, scales, numbers of heads) have separate wrappers. The arguments are those of
FlashInfer 0.2 and newer (https://docs.flashinfer.ai/api/attention.html).

CUDA graphs are not supported, because plans come from the host. Refuses to know: models,
schedulers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions

# Memory in which FlashInfer merges the results of split keys; its documentation uses 128 MiB.
WORKSPACE_BYTES = 256 * 2**20
# Number of sets of wrappers. A set can be planned again only when the device has finished the set's
# last step. So with two sets, the host can plan a step while the device computes the step before.
_TURNS = 2
HEAD_SIZES = (64, 128, 256)  # head sizes for which FlashInfer's releases have kernels


def is_installed() -> bool:
    """Return whether FlashInfer can be imported."""
    return find_spec("flashinfer") is not None


def reason_against_head(head_dim: int) -> str | None:
    """Return a phrase that says why heads of this size are not supported; None: they are."""
    if head_dim in HEAD_SIZES:
        return None
    return f"heads must have {', '.join(map(str, HEAD_SIZES))} numbers, got {head_dim}"


class _Alike(NamedTuple):
    """The properties that all layers with one plan have in common."""

    is_decode: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    options: AttentionOptions
    dtype: torch.dtype


class FlashInferAttention:
    """``AttentionBackend`` over FlashInfer's wrappers for decodes and for prompts.

    Supports only float16 and bfloat16, as does the library.
    """

    def __init__(self) -> None:
        self._library: Any = import_module("flashinfer")
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._wrappers: dict[tuple[_Alike, int], Any] = {}
        # For each set, an event after the last step that used it: until then, the device may still
        # copy the plan from the wrappers' host buffers.
        self._used: dict[int, torch.cuda.Event] = {}
        self._turn = 0  # the set of wrappers that this step uses
        self._planned: set[_Alike] = set()  # plans of this step
        self._num_rows = 0  # first row of padding

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return why a float8 cache is not supported: the library needs the model's dtype."""
        return "it takes a cache of the model's dtype only"

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step; the plan for each kind of layer is made by ``run``."""
        if self._planned and metadata.seq_lens.device.type == "cuda":
            self._used[self._turn] = torch.cuda.current_stream().record_event()
        self._planned.clear()
        self._turn = (self._turn + 1) % _TURNS
        if self._turn in self._used:
            self._used.pop(self._turn).synchronize()
        self._num_rows = sum(metadata.query_lens)

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention (``AttentionBackend.run``), without latents or sinks."""
        assert options.value_dim is None, "values are as long as keys"
        assert options.sinks is None, "refused when the backend is chosen"
        if not self._num_rows:
            return torch.zeros_like(query)
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        alike = _Alike(
            max(metadata.query_lens) == 1, query.shape[1], num_kv_heads, head_dim, block_size,
            options, query.dtype,
        )  # fmt: skip
        wrapper = self._wrapper(alike, query.device)
        if alike not in self._planned:
            _plan(wrapper, alike, metadata)
            self._planned.add(alike)
        found: Tensor = wrapper.run(query[: self._num_rows], kv_cache)
        if self._num_rows == len(query):
            return found
        return torch.cat((found, found.new_zeros(len(query) - self._num_rows, *found.shape[1:])))

    def _wrapper(self, alike: _Alike, device: torch.device) -> Any:
        wrapper = self._wrappers.get((alike, self._turn))
        if wrapper is None:
            if self._workspace.device != device or not len(self._workspace):
                # Make normal tensors, not inference tensors, because a later caller may be outside
                # of inference_mode.
                with torch.inference_mode(mode=False):
                    self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            name = "Decode" if alike.is_decode else "Prefill"
            make = getattr(self._library, f"Batch{name}WithPagedKVCacheWrapper")
            self._wrappers[alike, self._turn] = wrapper = make(self._workspace, "HND")
        return wrapper


def _plan(wrapper: Any, alike: _Alike, metadata: AttentionMetadata) -> None:
    """Let a wrapper plan the step's requests, except padding requests without new tokens."""
    size = alike.block_size
    requests = [i for i, query_len in enumerate(metadata.query_lens) if query_len]
    blocks = [-(-metadata.seq_lens_host[i] // size) for i in requests]
    # These tensors are on the host, where the library reads them.
    pairs = list(zip(requests, blocks, strict=True))
    last_lens = [metadata.seq_lens_host[i] - (n - 1) * size for i, n in pairs]
    indices = torch.cat([metadata.block_table[i, :n] for i, n in pairs])
    pages = (_starts(blocks), indices, _host_ints(last_lens))
    sizes = (alike.num_heads, alike.num_kv_heads, alike.head_dim, size)
    window, soft_cap = alike.options.sliding_window, alike.options.soft_cap
    shared = {
        "sm_scale": alike.options.scale,
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": soft_cap,
        "q_data_type": alike.dtype,
        "kv_data_type": alike.dtype,
    }
    if alike.is_decode:
        wrapper.plan(*pages, *sizes, **shared)
    else:
        query_starts = _starts([metadata.query_lens[i] for i in requests])
        wrapper.plan(query_starts, *pages, *sizes, causal=True, **shared)


def _starts(lens: list[int]) -> Tensor:
    """Return where each of the adjacent parts begins, and the end: ``[len(lens) + 1]`` int32."""
    return torch.tensor([0, *lens], device="cpu").cumsum(0).to(torch.int32)


def _host_ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")
