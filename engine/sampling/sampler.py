"""Sampler: turns logits into tokens. Randomness depends only on (seed, output position, token id).

A request gets the same tokens in any batch, on any node, and after any preemption or retry. This
file applies the filters (top-k, top-p, min-p); gumbel.py draws from the kept tokens. Work per
vocabulary entry is in float32; on a CPU, the final decision is in float64. On a GPU with Triton,
`baton_kernels.triton.sampling.tokens` gives the same tokens in a few kernel launches.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import baton_kernels as ops
from engine.sampling.device_sampling import (
    LARGEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    sample_on_device,
    upload_parameters,
)
from engine.sampling.gumbel import NO_TOKEN, Floats, TokenIds, Words, best_scores, draw
from engine.sampling.logits import adjust_logits
from engine.sampling.sampling_input import SamplingInput

# How many of the largest logits to sort for top-p: first the smaller number, and if their mass is
# not enough, the larger one. Most distributions have nearly all their mass in few tokens, and
# sorting a whole vocabulary takes many times longer.
TOP_VALUES = (128, 2048)
# If filters keep more than this fraction of the logits, drawing from all logits is faster.
MANY_KEPT = 1 / 32
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def sample(
    logits: Tensor,
    sampling: SamplingInput,
    allowed_bits: Callable[[], Mapping[str, Sequence[npt.NDArray[np.uint8]]]] = dict,
) -> list[int]:
    """Sample one token per row; NO_TOKEN for a row with NaN (on a CPU, not for greedy rows).

    Args:
        logits: `[num_sampling, vocab_size]`; row i belongs to row i of ``sampling``.
        allowed_bits: masks of the tokens that grammars allow, by request id
            (`StepHooks.allowed_bits`).
    """
    parameters, keys = sampling.parameters, sampling.keys
    if not (logits.is_cuda and _HAS_TRITON):  # only the Triton kernel reads logits of every dtype
        if sampling.is_greedy:
            return _as_list(_most_probable(logits, parameters, keys))
        logits = logits.float()
    if not sampling.adjusted:
        return _as_list(choose(logits, parameters, keys))
    token_ids = np.empty(len(logits), dtype=np.int64)
    adjusted = np.fromiter(sampling.adjusted, dtype=np.int64)
    plain = np.delete(np.arange(len(logits)), adjusted)
    allowed = {request_id: iter(masks) for request_id, masks in allowed_bits().items()}
    bits = {
        index: mask
        for index, row in enumerate(sampling.adjusted)
        # A row without drafts has at most one mask.
        for mask in islice(allowed.get(sampling.request_ids[row], ()), 1)
    }
    changed = adjust_logits(_rows(logits, adjusted), list(sampling.adjusted.values()), bits)
    token_ids[adjusted] = choose(changed, parameters[adjusted], keys[adjusted])
    if len(plain):
        token_ids[plain] = choose(_rows(logits, plain), parameters[plain], keys[plain])
    return _as_list(token_ids)


def rows_without_numbers(logits: Tensor, token_ids: Sequence[int]) -> list[int]:
    """List the rows whose logits are NaN or infinite, so that their tokens are invalid.

    Looks only at the logit of each row's chosen token, which takes nearly no time and suffices: one
    NaN in a hidden state makes all logits of its row NaN.

    Args:
        logits: `[num_sampling, vocab_size]`, as `sample` was given.
        token_ids: `[num_sampling]`, as `sample` returned.
    """
    places = torch.tensor(token_ids, device=logits.device).clamp_(min=0)
    chosen = logits.gather(1, places.unsqueeze(1)).squeeze(1).tolist()
    return [
        row
        for row, (token_id, logit) in enumerate(zip(token_ids, chosen, strict=True))
        if token_id == NO_TOKEN or not logit < math.inf
    ]


def _as_list(token_ids: TokenIds) -> list[int]:
    as_list: list[int] = token_ids.tolist()
    return as_list


def choose(logits: Tensor, parameters: npt.NDArray[np.void], keys: Words) -> TokenIds:
    """Return one token per row: the most probable one for greedy requests, else a drawn one."""
    if logits.is_cuda and _HAS_TRITON:
        return _choose_by_kernel(logits, parameters, keys)
    filtered = (parameters["top_k"] > 0) | (parameters["top_p"] < 1) | (parameters["min_p"] > 0)
    ways = np.where(parameters["temperature"] == 0, 0, 1 + filtered)
    by_way = (_most_probable, _draw, _draw_filtered)
    if len(ways) == 1 or (ways == ways[0]).all():
        return by_way[ways[0]](logits, parameters, keys)
    token_ids = np.empty(len(logits), dtype=np.int64)
    for way in np.unique(ways):
        rows = (ways == way).nonzero()[0]
        token_ids[rows] = by_way[way](_rows(logits, rows), parameters[rows], keys[rows])
    return token_ids


def _choose_by_kernel(logits: Tensor, parameters: npt.NDArray[np.void], keys: Words) -> TokenIds:
    """Choose tokens on the device of the logits; copy all parameters to it in one copy."""
    tensors = upload_parameters(parameters, keys, logits.device)
    # Only float64 is converted: the kernel would add converted rows of other dtypes in another
    # order, which would change the rounding.
    if logits.dtype == torch.float64:
        # A large penalty may give values beyond the range of float32, which must not become
        # infinity.
        logits = logits.clamp(max=torch.finfo(torch.float32).max).float()
    token_ids: TokenIds = sample_on_device(logits, tensors).cpu().numpy()
    return token_ids


def _rows(logits: Tensor, rows: TokenIds) -> Tensor:
    """Return some rows of the logits, without a copy if all rows are wanted."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]


def _most_probable(logits: Tensor, parameters: npt.NDArray[np.void], keys: Words) -> TokenIds:
    token_ids: TokenIds = ops.largest(logits).cpu().numpy()
    return token_ids


def _draw(logits: Tensor, parameters: npt.NDArray[np.void], keys: Words) -> TokenIds:
    return draw(logits, _temperatures(parameters), keys)


def _temperatures(parameters: npt.NDArray[np.void]) -> Floats:
    return parameters["temperature"].clip(LEAST_TEMPERATURE, LARGEST_TEMPERATURE)


# ------------------------------------------------------------------ with filters


def _draw_filtered(logits: Tensor, parameters: npt.NDArray[np.void], keys: Words) -> TokenIds:
    """Draw one of the kept tokens, with the same noise as a draw from all tokens.

    Both draws give the same token unless a filter drops the token of the draw from all tokens.
    """
    temperatures = _temperatures(parameters)
    least = least_kept(logits, parameters)[:, None]
    if logits.is_cuda:
        gone = logits < torch.from_numpy(least).to(logits)
        return draw(logits.masked_fill(gone, -torch.inf), temperatures, keys)
    host = logits.numpy()
    kept = host >= least.astype(host.dtype)  # [num_requests, vocab_size]
    if np.count_nonzero(kept) > MANY_KEPT * kept.size:
        return draw(torch.from_numpy(np.where(kept, host, -np.inf)), temperatures, keys)
    index = np.flatnonzero(kept)
    rows, token_ids = np.divmod(index, host.shape[1])
    values = host.reshape(-1)[index].astype(np.float64)
    return best_scores(len(host), rows, token_ids, values, temperatures, keys)


def least_kept(logits: Tensor, parameters: npt.NDArray[np.void]) -> Floats:
    """Return the least logit that each request's filters keep: `[num_requests]`.

    Top-p applies to the distribution of the tokens that top-k keeps, and keeps the token that
    crosses the threshold. Min-p (Nguyen et al., "Turning Up the Heat", arXiv 2407.01082) is given
    as a fraction of the best token's probability. Equally probable tokens are kept or dropped
    together, so that the result depends neither on the order in which a sort leaves equals nor on
    the batch.
    """
    vocab_size = logits.shape[-1]
    top_k, top_p = parameters["top_k"], parameters["top_p"]
    limits = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    open_ended = (limits == vocab_size) & (top_p < 1)
    num_values = int(np.where(limits < vocab_size, limits, 1).max())
    if open_ended.any():
        num_values = max(num_values, min(TOP_VALUES[0], vocab_size))
    ordered = _largest(logits, num_values)
    best = ordered[:, 0].copy()
    totals = np.ones(len(logits))
    if open_ended.any():
        rows = open_ended.nonzero()[0]
        totals[rows] = _total_weight(_rows(logits, rows), parameters[rows])
    least, enough = _least_of(ordered, limits, totals, parameters)
    for num_values in (*TOP_VALUES[1:], vocab_size):
        short = (open_ended & ~enough).nonzero()[0]
        if not len(short):
            break
        ordered = _largest(_rows(logits, short), min(num_values, vocab_size))
        found = _least_of(ordered, limits[short], totals[short], parameters[short])
        least[short], enough[short] = found
    with np.errstate(divide="ignore", invalid="ignore"):
        by_min_p = best + _temperatures(parameters) * np.log(parameters["min_p"])
    kept: Floats = np.fmax(least, by_min_p)
    return kept


def _least_of(
    ordered: Floats,
    limits: npt.NDArray[np.int64],
    totals: Floats,
    parameters: npt.NDArray[np.void],
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the least logit that top-k and top-p keep, and whether ``ordered`` is long enough.

    Args:
        ordered: `[num_requests, num_values]`, the largest logits, descending.
        limits: `[num_requests]`, top-k; the vocabulary size if top-k is off.
        totals: `[num_requests]`, total weight of the vocabulary; read only where top-p alone is on.

    Returns:
        The least logits and the flags, `[num_requests]` each.
    """
    num_values = ordered.shape[1]
    top_p = parameters["top_p"]
    weights = _weights(ordered, ordered[:, 0], parameters)
    weights[np.arange(num_values) >= limits[:, None]] = 0
    cumulative = weights.cumsum(axis=1)
    has_top_k = limits <= num_values
    target = top_p * np.where(has_top_k, cumulative[:, -1], totals)
    target[top_p >= 1] = np.inf
    kept = (weights > 0) & (cumulative - weights < target[:, None])
    last = np.maximum(kept.sum(axis=1) - 1, 0)
    least = ordered[np.arange(len(ordered)), last]
    return np.where(has_top_k | (top_p < 1), least, -np.inf), cumulative[:, -1] >= target


def _weights(values: Floats, best: Floats, parameters: npt.NDArray[np.void]) -> Floats:
    """Return logits' weights, 1 for the largest logit; `[num_requests, n]` in and out."""
    with np.errstate(invalid="ignore", under="ignore"):  # NaN if all tokens are banned
        weights: Floats = np.exp((values - best[:, None]) / _temperatures(parameters)[:, None])
    return weights


def _total_weight(logits: Tensor, parameters: npt.NDArray[np.void]) -> Floats:
    """Return the sum of `_weights` over the vocabulary: `[num_requests]`."""
    temperatures = torch.from_numpy(_temperatures(parameters)).to(logits).unsqueeze(1)
    # The weight of the best token is 1, so its probability is the reciprocal of the total weight.
    shares = (logits / temperatures).softmax(dim=-1)
    best: Floats = shares.amax(dim=-1).double().cpu().numpy()
    return 1 / best


def _largest(logits: Tensor, num_values: int) -> Floats:
    """Return the largest logits, descending: `[num_requests, num_values]` float64 on the host."""
    if logits.is_cuda:
        return np.asarray(logits.topk(num_values).values.cpu().numpy(), dtype=np.float64)
    values = logits.numpy()  # numpy's partition takes 1/5 of the time of torch's topk
    if num_values == 1:
        return np.asarray(values.max(axis=1, keepdims=True), dtype=np.float64)
    first = values.shape[1] - num_values
    largest = np.partition(values, first, axis=1)[:, first:] if first else values.copy()
    largest.sort(axis=1)
    return np.asarray(largest[:, ::-1], dtype=np.float64)
