"""Sampler: logits to tokens. Randomness is a function of (seed, output position) alone.

So the same request gives the same tokens whatever shares its batch, whichever node samples, and
after any preemption or retry: there is no generator state to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import Request

_MASK = 0xFFFFFFFF


def counter_uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) for one output position of one request.

    Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with
    the seed as key and the position as counter; 53 bits of its output.
    """
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = position & _MASK, (position >> 32) & _MASK, 0, 0
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ key0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return ((c0 << 32 | c1) >> 11) * 2.0**-53


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One next token per request.

    Args:
        logits: `[num_requests, vocab_size]` float32; row i belongs to ``requests[i]``.
    """
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    random_rows = [i for i, r in enumerate(requests) if r.sampling_params.temperature > 0]
    if random_rows:
        chosen = [requests[i] for i in random_rows]
        sampled = _sample_random(logits[random_rows], chosen)
        for row, token_id in zip(random_rows, sampled, strict=True):
            token_ids[row] = token_id
    return token_ids


def _sample_random(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Inverse-transform sampling of the filtered distribution, in vocabulary order.

    In float64, so that rounding that differs between batches or nodes hardly ever moves a draw.
    """
    params = [request.sampling_params for request in requests]
    device = logits.device

    def column(values: list[float]) -> Tensor:  # [num_requests, 1]
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    # A temperature next to zero would overflow the division; it is greedy by then.
    temperature = column([max(p.temperature, 1e-6) for p in params])
    scaled = (logits.double() - logits.double().amax(dim=-1, keepdim=True)) / temperature
    probabilities = scaled.softmax(dim=-1)  # [num_requests, vocab_size]
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        probabilities = _filter_top_k_top_p(
            probabilities, [p.top_k for p in params], column([p.top_p for p in params])
        )
    cumulative = probabilities.cumsum(dim=-1)
    uniform = column([counter_uniform(r.seed, r.num_output_tokens) for r in requests])
    # Strictly greater: a token of probability 0 is never drawn, not even by uniform = 0.
    drawn = (cumulative > uniform * cumulative[:, -1:]).to(torch.uint8).argmax(dim=-1)
    token_ids: list[int] = drawn.tolist()
    return token_ids


def _filter_top_k_top_p(probabilities: Tensor, top_k: list[int], top_p: Tensor) -> Tensor:
    """Zero what top-k, then top-p leaves out. `[num_requests, vocab_size]` in and out.

    Top-p looks at the distribution that top-k left, renormalised, and keeps the token that
    crosses the threshold.
    """
    vocab_size = probabilities.shape[-1]
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    limits = torch.tensor(
        [[min(k, vocab_size) if k > 0 else vocab_size] for k in top_k], device=ordered.device
    )
    rank = torch.arange(vocab_size, device=ordered.device)  # [vocab_size]
    ordered = ordered.masked_fill(rank >= limits, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill((mass_before >= top_p) & (rank > 0), 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)
