"""Sample one token per row without a sort: top-k, top-p, min-p and seeded Gumbel-max noise.

There are always three launches, and the host reads no result in between, so a CUDA graph can hold
the launches.

    partials   reads every token: best score, total weight, best logit of each group of tokens
    choose     decides rows without filters; for other rows, reads the groups with the best logits
    search     decides rows where filters keep many tokens, in several passes over the row

As in FlashInfer's sampling kernels (https://flashinfer.ai, "Sorting-Free GPU Kernels for LLM
Sampling"), tokens are drawn and rejected until one is kept by the filters. But each token has fixed
noise, instead of new random numbers per round. Refuses to know: penalties, grammars, requests.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher
from baton_kernels.triton.sampling.kernels import choose_kernel, partials_kernel, search_kernel

# Number of tokens in a part and in a group: one program of the first kernel reads a part, and the
# second kernel reads or skips the logits of a group together.
PART, GROUP = 2048, 64
# Maximum number of candidates that the second kernel can hold, and its k for rows without top-k.
MOST, DEFAULT_K = 1024, 256
TILE = 16  # groups whose logits are read at once
SEARCH_BLOCK = 4096  # 8192 would spill registers for bfloat16


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
) -> Tensor:
    """Sample one token per row: the best ``logit + temperature * noise(key, id)`` of kept tokens.

    Top-k, then top-p of the remaining tokens, and min-p decide which tokens are kept; equally
    probable tokens are kept or dropped together. The tokens equal those of
    `engine.sampling.sampler` in float32.

    Args:
        logits: ``[num_rows, vocab_size]``, contiguous rows; other dtypes are read as float32.
        temperatures: ``[num_rows]`` float32; 0: greedy, the first of the best logits.
        top_k: ``[num_rows]`` int32; 0: off.
        top_p: ``[num_rows]`` float32; 1: off.
        min_p: ``[num_rows]`` float32; 0: off.
        keys: ``[num_rows, 2]`` int32, the bits of two random words that depend on seed and
            position.

    Returns:
        ``[num_rows]`` int64; 0 if every logit is minus infinity, -1 if a logit is NaN or plus
        infinity.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype.is_floating_point
    assert logits.stride(1) == 1 or vocab_size == 1
    num_parts, num_groups = -(-vocab_size // PART), -(-vocab_size // GROUP)
    parameters = (temperatures, top_k, top_p, min_p)
    assert all(parameter.is_contiguous() for parameter in (*parameters, keys))

    def workspace(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    maxima = workspace(num_rows, num_groups)
    bests, totals, scores = (workspace(num_rows, num_parts) for _ in range(3))
    best_tokens = workspace(num_rows, num_parts, dtype=torch.int32)
    groups = workspace(num_rows, num_groups, dtype=torch.int32)
    candidates = workspace(num_rows, MOST, dtype=torch.int32)
    rows, undecided = workspace(num_rows, 2), workspace(num_rows, dtype=torch.int32)
    token_ids = workspace(num_rows, dtype=torch.int64)
    if not num_rows:
        return token_ids
    partials = (maxima, bests, totals, scores, best_tokens)
    find_partials, choose, search = _launchers(num_parts, num_groups)
    sizes = (logits.stride(0), vocab_size)
    find_partials(
        (num_parts, num_rows), (logits, temperatures, keys, *partials),
        (*sizes, num_parts, num_groups),
    )  # fmt: skip
    choose(
        (num_rows,),
        (logits, *parameters, keys, *partials, groups, candidates, rows, undecided, token_ids),
        (*sizes, num_parts, num_groups),
    )
    search((num_rows,), (logits, *parameters, keys, rows, undecided, token_ids), sizes)
    return token_ids


@functools.cache
def _launchers(num_parts: int, num_groups: int) -> tuple[Launcher, Launcher, Launcher]:
    return (
        Launcher(partials_kernel, BLOCK=PART, GROUP=GROUP, num_warps=8),
        Launcher(
            choose_kernel,
            PARTS=triton.next_power_of_2(num_parts), GROUPS=triton.next_power_of_2(num_groups),
            GROUP=GROUP, TILE=TILE, MOST=MOST, DEFAULT_K=DEFAULT_K, num_warps=8,
        ),
        Launcher(search_kernel, BLOCK=SEARCH_BLOCK, num_warps=16),
    )  # fmt: skip


_FLOATS, _INTS = "*fp32", "*i32"
_ROW = {
    "logits_ptr": "*bf16", "temperatures_ptr": _FLOATS, "top_k_ptr": _INTS, "top_p_ptr": _FLOATS,
    "min_p_ptr": _FLOATS, "keys_ptr": _INTS,
}  # fmt: skip
_PARTIALS = {
    "maxima_ptr": _FLOATS, "bests_ptr": _FLOATS, "totals_ptr": _FLOATS, "scores_ptr": _FLOATS,
    "tokens_ptr": _INTS,
}  # fmt: skip
_SIZES = {"logits_stride": "i32:16", "vocab_size": "i32:16"}
_COUNTS = {"num_parts": "i32", "num_groups": "i32"}
# Constants for Qwen3's vocabulary of 151,936 tokens.
AOT_CASES = (
    AotCase(
        "sampling partials bf16",
        partials_kernel,
        {
            **{name: _ROW[name] for name in ("logits_ptr", "temperatures_ptr", "keys_ptr")},
            **_PARTIALS, **_SIZES, **_COUNTS, "BLOCK": "constexpr", "GROUP": "constexpr",
        },
        {"BLOCK": PART, "GROUP": GROUP},
        num_warps=8,
    ),
    AotCase(
        "sampling choose bf16",
        choose_kernel,
        {
            **_ROW, **_PARTIALS, "groups_ptr": _INTS, "candidates_ptr": _INTS,
            "rows_ptr": _FLOATS, "undecided_ptr": _INTS, "out_ptr": "*i64", **_SIZES, **_COUNTS,
            **dict.fromkeys(("PARTS", "GROUPS", "GROUP", "TILE", "MOST", "DEFAULT_K"), "constexpr"),
        },
        {
            "PARTS": 128, "GROUPS": 4096, "GROUP": GROUP, "TILE": TILE, "MOST": MOST,
            "DEFAULT_K": DEFAULT_K,
        },
        num_warps=8,
    ),
    AotCase(
        "sampling search bf16",
        search_kernel,
        {
            **_ROW, "rows_ptr": _FLOATS, "undecided_ptr": _INTS, "out_ptr": "*i64", **_SIZES,
            "BLOCK": "constexpr",
        },
        {"BLOCK": SEARCH_BLOCK},
        num_warps=16,
    ),
)  # fmt: skip
