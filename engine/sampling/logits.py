"""Adjusts logits for a request, with penalties, biases and bans, before a token is chosen.

The result depends only on the model's logits and on the request's own tokens and parameters, not on
the batch, the node or preemptions. Refuses to know: temperature, randomness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.api.sampling_params import SamplingParams
from engine.sampling.sampling_input import RequestSnapshot

# Largest magnitude of a penalized logit; without it, a penalty close to 0 or to infinity would make
# the logit infinite.
_LARGEST_LOGIT = 1e300


def adjust_logits(
    logits: Tensor,
    requests: Sequence[RequestSnapshot],
    allowed_bits: Mapping[int, NDArray[np.uint8]] = MappingProxyType({}),
) -> Tensor:
    """Apply requests' penalties, biases, bans and grammars; `[num_requests, vocab_size]`.

    Repetition penalty: Keskar et al., "CTRL", arXiv 1909.05858. Presence and frequency penalty and
    logit bias: as in the OpenAI API.

    Args:
        logits: row i belongs to ``requests[i]``; not modified.
        allowed_bits: tokens that grammars allow, by row; see `GrammarState.allowed_bits`.

    Returns:
        float64; banned tokens are minus infinity.
    """
    adjusted = logits.to(torch.float64, copy=True)
    masks = _unpack(allowed_bits, adjusted)
    for index, (row, request) in enumerate(zip(adjusted, requests, strict=True)):
        params = request.sampling_params
        if params.repetition_penalty != 1:
            _penalize_repetition(row, set(request.token_ids), params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            _penalize_output(row, Counter(request.output_token_ids), params)
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias, strict=True)
            row[_index(token_ids, row)] += _values(biases, row)
        _ban(row, request, masks.get(index))
    return adjusted


def _penalize_repetition(row: Tensor, token_ids: Collection[int], penalty: float) -> None:
    index = _index(token_ids, row)
    seen = row[index]
    seen = torch.where(seen > 0, seen / penalty, seen * penalty)
    row[index] = seen.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)


def _penalize_output(row: Tensor, counts: Counter[int], params: SamplingParams) -> None:
    if counts:
        times = _values(list(counts.values()), row)
        penalty = params.presence_penalty + params.frequency_penalty * times
        row[_index(counts.keys(), row)] -= penalty


def _ban(row: Tensor, request: RequestSnapshot, allowed: Tensor | None) -> None:
    """Set the logits of forbidden tokens to minus infinity; if none remains, allow end tokens."""
    params = request.sampling_params
    if params.allowed_token_ids is not None:
        only = torch.full_like(row, -torch.inf)
        index = _index(params.allowed_token_ids, row)
        only[index] = row[index]
        row.copy_(only)
    if params.banned_token_ids:
        row[_index(params.banned_token_ids, row)] = -torch.inf
    if allowed is not None:
        row.masked_fill_(~allowed, -torch.inf)
    if request.num_output_tokens < params.min_tokens:
        # Ignore end tokens that the checkpoint names, but that are not in its vocabulary.
        ends = [token_id for token_id in request.stop_token_ids if token_id < len(row)]
        without_ends = row.index_fill(0, _index(ends, row), -torch.inf)
        row.copy_(torch.where(without_ends.isfinite().any(), without_ends, row))


def _unpack(bits: Mapping[int, NDArray[np.uint8]], logits: Tensor) -> dict[int, Tensor]:
    """Unpack the bits of tokens that grammars allow into one mask per row: `[vocab_size]` bool."""
    if not bits:
        return {}
    # Unpack the bits on the device, because packed bits are an eighth of the bytes to copy.
    packed = torch.from_numpy(np.stack(list(bits.values()))).to(logits.device)
    values = torch.arange(256, device=logits.device).unsqueeze(1)
    unpacked = (values >> torch.arange(8, device=logits.device) & 1).bool()  # [256, 8]
    masks = unpacked[packed.long()].flatten(1)[:, : logits.shape[1]]
    return dict(zip(bits, masks, strict=True))


def _index(token_ids: Collection[int], row: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=row.device)


def _values(values: Sequence[float], row: Tensor) -> Tensor:
    return torch.tensor(values, dtype=row.dtype, device=row.device)
