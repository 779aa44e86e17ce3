"""Gumbel-max sampling with noise that depends only on (seed, output position, token id).

    token = argmax over t of  logit(t) + temperature * G(seed, position, t)

With Gumbel-distributed G, the token is drawn from softmax(logit / temperature): Maddison, Tarlow
and Minka, "A* Sampling", NeurIPS 2014. Rounding differs between batches and nodes, but changes the
drawn token only if the two best scores nearly tie. If the cumulative distribution were inverted
instead, rounding at any token could change the drawn one. Scores are float64 on a CPU, and have the
logits' dtype on a GPU. Refuses to know: filters, requests.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

# Number of logits that are processed together: they and their noise fit into a core's cache.
CHUNK_ELEMENTS = 2**16
NO_TOKEN = -1
# 2**32 / golden ratio; multiplying by it moves neighbouring ids far apart
_SPREAD = 0x9E3779B9
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = 0x7FEB352D, 0x846CA68B
# A float's bits, read as an integer and divided by 2**23, are about its binary logarithm plus 127
# (the exponent bias). Another 32 is subtracted because the share is the 32-bit hash divided by
# 2**32.
_BITS_OFFSET = 127 + 32


def noise_hashes(keys: Words, token_ids: npt.NDArray[np.integer]) -> Words:
    """Return one evenly distributed 32-bit word per key and token id.

    For one key, different ids give different words. The mixing function and its multipliers are
    `lowbias32` of Chris Wellons' hash-prospector (https://github.com/skeeto/hash-prospector); the
    key is mixed in before and between the multiplications.

    Args:
        keys: `[..., 2]`, from `counter_words` of a seed and a position.
        token_ids: broadcast against the leading dimensions of ``keys``.
    """
    shape = np.broadcast_shapes(keys.shape[:-1], token_ids.shape)
    hashes, scratch = np.empty(shape, dtype=np.uint32), np.empty(shape, dtype=np.uint32)
    _mix(_spread(token_ids), keys, hashes, scratch)
    return hashes


def gumbel(hashes: Words) -> Floats:
    """Turn 32-bit hashes into Gumbel-distributed noise, from -3.2 to 22.9."""
    # Large noise must be precise. It comes from shares near 0, where floats are finest.
    shares = (hashes + 0.5) * 2.0**-32
    noise: Floats = -np.log(-np.log1p(-shares))
    return noise


def best_scores(
    num_rows: int,
    rows: TokenIds,
    token_ids: TokenIds,
    logits: Floats,
    temperatures: Floats,
    keys: Words,
) -> TokenIds:
    """Find the token with the best score in each row; NO_TOKEN where every score is NaN.

    Args:
        rows, token_ids, logits: `[num_candidates]`, row, token id and logit of each candidate,
            sorted by row, then by token id.
        temperatures: `[num_rows]`, above 0.
        keys: `[num_rows, 2]`, random words of each row.

    Returns:
        The winning token ids, `[num_rows]`.
    """
    scores = logits + temperatures[rows] * gumbel(noise_hashes(keys[rows], token_ids))
    best = np.full(num_rows, -np.inf)
    np.fmax.at(best, rows, scores)
    winners = (scores == best[rows]).nonzero()[0][::-1]  # the first of equal scores wins
    drawn = np.full(num_rows, NO_TOKEN, dtype=np.int64)
    drawn[rows[winners]] = token_ids[winners]
    return drawn


def draw(logits: Tensor, temperatures: Floats, keys: Words) -> TokenIds:
    """Draw one token per row from the whole vocabulary.

    Args:
        logits: `[num_rows, vocab_size]`, float32 or float64; minus infinity is never drawn.
        temperatures: `[num_rows]`, above 0.
        keys: `[num_rows, 2]`, random words of each row.

    Returns:
        `[num_rows]`; 0 if every token is minus infinity, and on a CPU NO_TOKEN if a token is NaN.
    """
    if logits.is_cuda:
        on_device: TokenIds = device_scores(logits, temperatures, keys).argmax(-1).cpu().numpy()
        return on_device
    num_rows, vocab_size = logits.shape
    host = logits.numpy()
    spread = _spread(np.arange(vocab_size, dtype=np.uint32))
    step = max(1, CHUNK_ELEMENTS // vocab_size)
    buffers = np.empty((2, min(step, num_rows), vocab_size), dtype=np.uint32)
    drawn = np.empty(num_rows, dtype=np.int64)
    for start in range(0, num_rows, step):
        chunk = slice(start, start + step)
        drawn[chunk] = _draw_chunk(host[chunk], temperatures[chunk], keys[chunk], spread, buffers)
    return drawn


def _draw_chunk(
    logits: npt.NDArray[np.floating],
    temperatures: Floats,
    keys: Words,
    spread: Words,
    buffers: Words,
) -> TokenIds:
    """Draw tokens for some rows: bound every score, then compute exactly only those that may win.

    Exact logarithms for all tokens would take as long as all other work of sampling.
    """
    num_rows, vocab_size = logits.shape
    hashes, scratch = buffers[:, :num_rows]
    _mix(spread, keys[:, None], hashes, scratch)
    bounds, offsets = _score_bounds(logits, temperatures, hashes, scratch)
    rows = np.arange(num_rows)
    likely = bounds.argmax(axis=1)  # only tokens whose bound exceeds this one's exact score may win
    values = logits[rows, likely].astype(np.float64)
    reached = values + temperatures * gumbel(noise_hashes(keys, likely))
    with np.errstate(invalid="ignore"):
        # A margin of ten times the rounding error of the bounds.
        rounding = 1e-4 * temperatures + 1e-6 * np.abs(reached)
        least = reached - rounding - offsets
    index = np.flatnonzero(bounds >= least[:, None].astype(bounds.dtype))
    rows, token_ids = np.divmod(index, vocab_size)
    values = logits[rows, token_ids].astype(np.float64)
    return best_scores(num_rows, rows, token_ids, values, temperatures, keys)


def _score_bounds(
    logits: npt.NDArray[np.floating], temperatures: Floats, hashes: Words, scratch: Words
) -> tuple[npt.NDArray[np.floating], Floats]:
    """Return upper bounds of scores, minus an offset per row; overwrites hashes and scratch.

    The noise G = -log(-log(1 - share)) is at most -log(share), because -log(1 - share) >= share. A
    float's bits, read as an integer, give its binary logarithm or up to 0.09 less (Mitchell,
    "Computer Multiplication and Division Using Binary Logarithms", 1962).

    Returns:
        The bounds minus offsets, `[num_rows, vocab_size]`, and the offsets, `[num_rows]`.
    """
    as_floats, bounds = scratch.view(np.float32), hashes.view(np.float32)
    as_floats[...] = hashes
    bounds[...] = scratch.view(np.int32)
    slopes = temperatures * math.log(2)
    bounds *= (slopes * -(2.0**-23)).astype(np.float32)[:, None]
    # Add in the logits' dtype: penalties may have made float64 logits beyond the range of float32.
    sums = np.add(bounds, logits, out=bounds if logits.dtype == np.float32 else None)
    return sums, slopes * _BITS_OFFSET


def _spread(token_ids: npt.NDArray[np.integer]) -> Words:
    return token_ids.astype(np.uint32, copy=False) * np.uint32(_SPREAD)


def _mix(spread: Words, keys: Words, hashes: Words, scratch: Words) -> None:
    """Write the `noise_hashes` of token ids to ``hashes``; ``spread`` is `_spread` of the ids."""
    np.add(spread, keys[..., 0], out=hashes)
    np.right_shift(hashes, 16, out=scratch)
    hashes ^= scratch
    hashes *= _FIRST_MULTIPLIER
    hashes ^= keys[..., 1]
    np.right_shift(hashes, 15, out=scratch)
    hashes ^= scratch
    hashes *= _SECOND_MULTIPLIER
    np.right_shift(hashes, 16, out=scratch)
    hashes ^= scratch


# ------------------------------------------------------------------ where the logits are


def device_hashes(keys: Words, vocab_size: int, device: torch.device) -> Tensor:
    """Return `noise_hashes` of all token ids as the bits of int32: `[num_rows, vocab_size]`."""
    words = torch.from_numpy(keys.view(np.int32)).to(device)  # [num_rows, 2]
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    hashes = token_ids * _signed(_SPREAD) + words[:, :1]
    hashes ^= _shifted(hashes, 16)
    hashes *= _signed(_FIRST_MULTIPLIER)
    hashes ^= words[:, 1:]
    hashes ^= _shifted(hashes, 15)
    hashes *= _signed(_SECOND_MULTIPLIER)
    hashes ^= _shifted(hashes, 16)
    return hashes


def device_scores(logits: Tensor, temperatures: Floats, keys: Words) -> Tensor:
    """Return each token's score, `[num_rows, vocab_size]`, in the logits' dtype.

    Args:
        logits: `[num_rows, vocab_size]`.
        temperatures: `[num_rows]`.
        keys: `[num_rows, 2]`, random words of each row.
    """
    hashes = device_hashes(keys, logits.shape[1], logits.device)
    shares = hashes.to(logits.dtype)
    shares.add_((hashes < 0).to(shares), alpha=2**32).add_(0.5)  # int32 hashes are read as unsigned
    noise = shares.mul_(-(2.0**-32)).log1p_().neg_().log_()  # -G
    return logits - torch.from_numpy(temperatures).to(logits).unsqueeze(1) * noise


def _shifted(words: Tensor, num_bits: int) -> Tensor:
    """Shift int32 words to the right; zeros come in from the left."""
    return (words >> num_bits).bitwise_and_(2 ** (32 - num_bits) - 1)


def _signed(word: int) -> int:
    """Return the int32 that has the same bits as an unsigned 32-bit word."""
    return word - 2**32 if word >= 2**31 else word
