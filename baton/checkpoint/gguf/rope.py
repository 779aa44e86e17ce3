"""GGUF RoPE: rebuilds config.json's RoPE fields from metadata and factors.

Knows no architectures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.architecture import Keys

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
DEFAULT_THETA = 10_000.0
# Parameters of Llama 3.1 to 3.3, whose RoPE scalings differ only in the factor.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192
_SAME = 1e-4


def rope_scaling(keys: Keys) -> Mapping[str, Any] | None:
    """Return the field ``rope_scaling`` of config.json; None: the frequencies are not scaled.

    Raises:
        ModelLoadError: the kind of scaling or one of its parameters is not supported.
    """
    if ROPE_FACTORS in keys.file.tensors:
        return _of_factors(keys, keys.file.floats(ROPE_FACTORS))
    if LONG_FACTORS in keys.file.tensors or SHORT_FACTORS in keys.file.tensors:
        return _longrope(keys)
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise keys.wrong("rope.scaling.type", f"{kind!r} is not supported; supported: linear, yarn")
    scaling = {"rope_type": kind, "factor": keys.decimal("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original_length(keys)
        for name in ("beta_fast", "beta_slow"):
            if keys.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = keys.decimal(f"rope.scaling.yarn_{name}")
    return scaling


def latent_yarn(keys: Keys) -> Mapping[str, Any] | None:
    """Return the field ``rope_scaling`` for DeepSeek: YaRN, which also scales dot products."""
    scaling = rope_scaling(keys)
    if scaling is None or scaling["rope_type"] != "yarn":
        return scaling
    if keys.get("rope.scaling.yarn_log_multiplier") is None:
        return {**scaling, "attention_factor": 1.0}
    mscale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def _longrope(keys: Keys) -> Mapping[str, Any]:
    """Return the field ``rope_scaling`` for Phi-3, with factors for short and long contexts."""
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for key, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        if name not in keys.file.tensors:
            raise ModelLoadError(f"{keys.file.path}: weights are missing: {name}")
        scaling[key] = _positive(keys, name, keys.file.floats(name))
    return scaling


def original_length(keys: Keys) -> int:
    """Return the context length for which the model was trained before RoPE was scaled."""
    return keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))


def _positive(keys: Keys, name: str, factors: Sequence[float]) -> list[float]:
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelLoadError(f"{keys.file.path}: {name}: must be numbers above 0")
    return list(factors)


def _of_factors(keys: Keys, factors: Sequence[float]) -> Mapping[str, Any]:
    """Return the field ``rope_scaling`` for a factor per frequency.

    The kind of scaling is Llama 3's if its formula gives these factors, else longrope.
    """
    values = _positive(keys, ROPE_FACTORS, factors)
    largest = max(values)
    theta = keys.number("rope.freq_base", DEFAULT_THETA)
    llama3 = list(_llama3_factors(theta, len(values), largest))
    if all(math.isclose(a, b, rel_tol=_SAME) for a, b in zip(values, llama3, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": round(largest, 4),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_LENGTH,
        }
    return {
        "rope_type": "longrope",  # the kind of scaling with a factor per frequency
        "short_factor": values,
        "long_factor": values,
        "attention_factor": 1.0,
        "original_max_position_embeddings": keys.integer("context_length"),
    }


def _llama3_factors(theta: float, number: int, factor: float) -> Iterable[float]:
    """Yield the factor that slows down each frequency (Llama 3.1, arXiv:2407.21783)."""
    for index in range(number):
        wavelength = 2 * math.pi * theta ** (index / number)
        share = (_LLAMA3_LENGTH / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        share = min(max(share, 0.0), 1.0)
        yield 1 / ((1 - share) / factor + share)
