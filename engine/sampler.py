"""Sampler: logits to tokens. Randomness is a function of (seed, output position) alone.

So the same request gives the same tokens whatever shares its batch, whichever node samples, and
after any preemption or retry: there is no generator state to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.logits import adjust_logits
from engine.request import Request

_MASK = 0xFFFFFFFF
# Most distributions have nearly all their mass in this many tokens; sorting a whole vocabulary for
# top-p costs many times more.
TOP_VALUES = 1024


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
    adjusted_rows = [i for i, r in enumerate(requests) if r.changes_logits]
    if not adjusted_rows:
        return _choose(logits, requests)
    plain_rows = [i for i, r in enumerate(requests) if not r.changes_logits]
    adjusted, plain = [requests[i] for i in adjusted_rows], [requests[i] for i in plain_rows]
    chosen = _choose(adjust_logits(logits[adjusted_rows], adjusted), adjusted)
    if plain:
        chosen += _choose(logits[plain_rows], plain)
    by_row = dict(zip(adjusted_rows + plain_rows, chosen, strict=True))
    return [by_row[row] for row in range(len(requests))]


def _choose(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """The most probable token of greedy requests, a drawn one of the others."""
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
    probabilities = (logits.double() / temperature).softmax(dim=-1)  # [num_requests, vocab_size]
    filtered_rows = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if filtered_rows:
        probabilities[filtered_rows] = _filter_top_k_top_p(
            probabilities[filtered_rows],
            [params[row].top_k for row in filtered_rows],
            [params[row].top_p for row in filtered_rows],
        )
    if any(p.min_p > 0 for p in params):
        # Nguyen et al., "Turning Up the Heat", arXiv 2407.01082.
        least = column([p.min_p for p in params]) * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    uniform = column([counter_uniform(r.seed, r.num_output_tokens) for r in requests])
    # Strictly greater: a token of probability 0 is never drawn, not even by uniform = 0.
    drawn = (cumulative > uniform * cumulative[:, -1:]).to(torch.uint8).argmax(dim=-1)
    token_ids: list[int] = drawn.tolist()
    return token_ids


def _filter_top_k_top_p(probabilities: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """Zero what top-k, then top-p leaves out. `[num_requests, vocab_size]` in and out.

    Top-p looks at the distribution that top-k left and keeps the token that crosses the threshold.
    Both become one least probability per request: equally probable tokens stay or go together, so
    that the order in which a sort leaves them does not matter.

    Sorts the largest `TOP_VALUES` only; all of them where those do not hold enough probability.
    """
    vocab_size = probabilities.shape[-1]
    limits = torch.tensor([[k if 0 < k < vocab_size else vocab_size] for k in top_k])
    mass = torch.tensor([[p] for p in top_p], dtype=torch.float64)
    limits, mass = limits.to(probabilities.device), mass.to(probabilities.device)
    wanted = max([k for k in top_k if k > 0], default=0)
    if any(p < 1 and k == 0 for k, p in zip(top_k, top_p, strict=True)):
        wanted = max(wanted, TOP_VALUES)
    num_values = min(wanted, vocab_size)
    least, enough = _least_kept(probabilities.topk(num_values).values, limits, mass)
    if num_values < vocab_size and not bool(enough.all()):
        least, _ = _least_kept(probabilities.topk(vocab_size).values, limits, mass)
    return probabilities.masked_fill(probabilities < least, 0.0)


def _least_kept(ordered: Tensor, limits: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The least probability that each request keeps, and whether ``ordered`` goes far enough.

    Args:
        ordered: `[num_requests, num_values]`, the largest probabilities, falling.
        limits: `[num_requests, 1]`, top-k; the size of the vocabulary when it is off.
        top_p: `[num_requests, 1]`; 1 when it is off.

    Returns:
        `[num_requests, 1]` both.
    """
    num_values = ordered.shape[-1]
    rank = torch.arange(num_values, device=ordered.device)  # [num_values]
    has_top_k = limits <= num_values
    kept = ordered.masked_fill(rank >= limits, 0.0)
    total = torch.where(has_top_k, kept.sum(dim=-1, keepdim=True), 1.0)
    mass_before = kept.cumsum(dim=-1) - kept
    kept = kept.masked_fill((mass_before >= top_p * total) & (rank > 0), 0.0)
    # The least of what is kept; where neither filter is on, nothing is left out.
    least = kept.masked_fill(kept == 0, torch.inf).amin(dim=-1, keepdim=True)
    least = torch.where(has_top_k | (top_p < 1), least, 0.0)
    reached = ordered.sum(dim=-1, keepdim=True) >= top_p * total
    return least, has_top_k | (top_p >= 1) | reached
