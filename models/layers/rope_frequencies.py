"""Rotary frequencies, in radians per position for each pair of dims, with all scalings of RoPE.

Formulas and order of operations follow ``transformers.modeling_rope_utils``, so that float32
frequencies have the same bits. Refuses to know: positions, heads, config files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.rope_config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Compute the rotary frequencies of a model, on the CPU.

    Args:
        rope: the model's rotary embedding.
        head_dim: size of one attention head.

    Returns:
        ``[rotary_dim / 2]`` float32, radians per position.
    """
    dim = rope.rotary_dim(head_dim)
    match rope.rope_type:
        case "none":
            return torch.zeros(dim // 2, dtype=torch.float32, device="cpu")
        case "proportional":
            return _proportional(rope, head_dim)
        case "linear":
            return _plain(rope, dim) / rope.factor
        case "llama3":
            return _llama3(rope, _plain(rope, dim))
        case "yarn":
            return _yarn(rope, dim)
        case "longrope":
            return _longrope(rope, dim)
        case _:
            # also for "dynamic", which does not scale sequences of up to rope.max_len tokens
            return _plain(rope, dim)


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim  # [dim / 2]


def _plain(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the frequencies without scaling (Su et al., arXiv:2104.09864)."""
    return 1.0 / (rope.theta ** _exponents(head_dim))  # [head_dim / 2]


def _proportional(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return frequencies computed for the whole head, but 0 for the pairs that are not rotated."""
    turning = int(rope.partial_rotary_factor * head_dim // 2)
    frequencies = _plain(rope, head_dim) / rope.factor  # [head_dim / 2]
    frequencies[turning:] = 0.0
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Scale frequencies as Llama 3.1 does.

    Long wavelengths are stretched by the factor, short wavelengths stay, and wavelengths between
    the two limits are interpolated.

    ::

        wavelength   | original / high   ...   original / low |
                keep |     ramp between the two               | divide by factor
    """
    original = rope.original_max_position_embeddings
    assert original is not None
    wavelengths = 2 * math.pi / frequencies  # [head_dim / 2]
    is_long = wavelengths > original / rope.low_freq_factor
    is_short = wavelengths < original / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (original / wavelengths - rope.low_freq_factor) / span  # [head_dim / 2]
    ramp = (1 - smooth) * frequencies / rope.factor + smooth * frequencies  # [head_dim / 2]
    stretched = torch.where(is_long, frequencies / rope.factor, frequencies)
    return torch.where(is_long | is_short, stretched, ramp)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Scale frequencies by YaRN (Peng et al., arXiv:2309.00071).

    The first pairs keep their frequencies, the last are divided by the factor, and those between
    are interpolated linearly.
    """
    original = rope.original_max_position_embeddings
    assert original is not None

    def pair_with(turns: float) -> float:
        span = math.log(original / (turns * 2 * math.pi))
        return (head_dim * span) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)  # [head_dim / 2]
    inverse = rope.theta ** _exponents(head_dim)  # [head_dim / 2]
    return 1.0 / (rope.factor * inverse) * (1 - keep) + 1.0 / inverse * keep


def _longrope(rope: RopeConfig, head_dim: int) -> Tensor:
    """Scale by LongRoPE (Ding et al., arXiv:2402.13753): each pair has its own divisor."""
    divisors = rope.long_factor if rope.use_long_factors else rope.short_factor
    divisor = torch.tensor(divisors, dtype=torch.float32, device="cpu")  # [head_dim / 2]
    return 1.0 / (divisor * rope.theta ** _exponents(head_dim))
