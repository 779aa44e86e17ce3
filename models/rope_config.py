"""RopeConfig: the rotary position embedding (RoPE) that config.json describes.

transformers 4 writes the fields ``rope_theta`` and ``rope_scaling``, transformers 5 one field
``rope_parameters``. Defaults and precedence follow ``transformers.modeling_rope_utils``.
Refuses to know: tensors, frequencies (``layers/rope_frequencies.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from models.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
# RoPE type of layers whose queries and keys are not rotated.
NO_ROPE_TYPE = "none"
_DEFAULT_THETA = 10_000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding of a model; attributes that its type does not use have defaults.

    In Hugging Face, the frequencies of ``dynamic`` and ``longrope`` depend on the current length of
    the sequence, so early keys are rotated differently from later keys. Baton's requests share
    cached blocks, so the rotation of a key may depend only on its position. Therefore, frequencies
    are fixed when the model is loaded: ``dynamic`` serves up to ``max_position_embeddings``, where
    it equals ``default``; ``longrope`` uses its short factors if ``max_model_len <=
    original_max_position_embeddings``, else its long factors for all lengths
    (``use_long_factors``).
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float = 1.0  # factor of all cosines and sines
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    use_long_factors: bool = False
    # Maximum number of positions with correct results; None: no such limit
    max_len: int | None = None
    # For each pair, the axis (0: frame, 1: row, 2: column) whose position rotates it; empty: one
    # axis
    axes: tuple[int, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of a head's dims that are rotated."""
        whole = self.rope_type == "proportional"  # all dims are rotated, some of them by 0
        return head_dim if whole else int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, slots=True)
class AxesRule:
    """The rule that assigns each rotary pair to one of three axes (Qwen2-VL's M-RoPE).

    ::

        sections 2, 3, 3     | 0 0 1 1 1 2 2 2 |
        interleaved          | 0 1 2 0 1 2 1 2 |      after a section's end: axis 0

    Attributes:
        sections: default number of rotary pairs per axis.
        interleaved: whether axes alternate (Qwen3-VL).
    """

    sections: tuple[int, int, int]
    interleaved: bool = False

    def axes(self, rope: Fields, num_pairs: int) -> tuple[int, ...]:
        """Return each pair's axis; raises ModelLoadError if the sections do not fit.

        Args:
            rope: the file's section about RoPE, which may override ``sections``.
            num_pairs: number of rotary pairs of a head.
        """
        sections = self.sections
        if rope.has("mrope_section"):
            first, second, third = map(int, rope.numbers("mrope_section", len(sections)))
            sections = (first, second, third)
        if min(sections) < 0 or (not self.interleaved and sum(sections) != num_pairs):
            raise rope.wrong("mrope_section", f"{sections} do not sum to {num_pairs} pairs")
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
        places = range(num_pairs)
        return tuple(place % 3 if place < 3 * sections[place % 3] else 0 for place in places)


# The embedding of models without RoPE: all cosines are 1, and all sines are 0.
NO_ROPE = RopeConfig(rope_type=NO_ROPE_TYPE)


def parse_ropes(
    fields: Fields,
    head_dim: int,
    max_position_embeddings: int,
    max_model_len: int | None,
    by_layer_type: bool = False,
    partial: bool = False,
    turning: float = 1.0,
) -> tuple[RopeConfig, RopeConfig | None]:
    """Read the rotary embeddings from the fields of config.json.

    Args:
        fields: fields of config.json.
        head_dim: size of one attention head.
        max_position_embeddings: the field of this name in config.json.
        max_model_len: longest sequence to serve, in tokens; None: the longest supported.
        by_layer_type: whether layers with a sliding window may have a separate rotary embedding.
        partial: whether the file may limit the rotation to a part of each head.
        turning: default fraction of a head's dims that is rotated.

    Returns:
        Two rotary embeddings: the first for layers with full attention, the second for layers with
        a sliding window. The second is None if the first is for all layers.

    Raises:
        ModelLoadError: the type is unknown, or a field is missing or out of range.
    """
    # If a file has both fields, the older field is used, as in transformers.
    older, newer = (
        fields.child(name) if fields.get(name) else Fields({}, "")
        for name in ("rope_scaling", "rope_parameters")
    )
    for section in (older, newer):
        nested = [name for name in section.names() if name.endswith("_attention")]
        unknown = [name for name in nested if not by_layer_type or name not in _LAYER_TYPES]
        if unknown:
            raise section.wrong(unknown[0], "RoPE per layer type is not supported")
    theta = fields.number("rope_theta", _DEFAULT_THETA)

    def parse(scaling: Fields, theta: float) -> RopeConfig:
        return _parse_one(
            *(fields, scaling, theta, head_dim, max_position_embeddings, max_model_len, partial),
            turning,
        )

    if not by_layer_type:
        return parse(older if older.names() else newer, theta), None
    # With RoPE by layer type, transformers reads this field only in a layer type's section.
    fields = fields.with_values({"original_max_position_embeddings": None})
    if older.has("type") and not older.has("rope_type") and not newer.names():
        raise older.wrong("type", "is not supported with this architecture, but rope_type is")
    local_theta = fields.number("rope_local_base_freq", theta)
    # The newer field is read only if it has a section per layer type; the older field is for
    # layers with full attention.
    full, sliding = (
        newer.child(name) if newer.has(name) else Fields({}, "") for name in _LAYER_TYPES
    )
    if older.names():
        only_newer = [name for name in full.names() if name not in older.names()]
        full = older.with_values({name: full.get(name) for name in only_newer})
    for section in (newer, full, sliding):
        # With RoPE by layer type, transformers ignores this field.
        if not section.boolean("truncate", True):
            raise section.wrong("truncate", "only true is supported with this architecture")
    return parse(full, theta), parse(sliding, local_theta)


def _parse_one(
    fields: Fields,
    scaling: Fields,
    theta: float,
    head_dim: int,
    max_position_embeddings: int,
    max_model_len: int | None,
    may_be_partial: bool,
    turning: float,
) -> RopeConfig:
    rope_type = _rope_type(scaling)
    partial = scaling.optional_number("partial_rotary_factor")
    if partial is None:
        partial = fields.number("partial_rotary_factor", turning)
    may_differ = may_be_partial or rope_type == "proportional"
    if partial > 1.0 or (partial != turning and not may_differ):
        # transformers ignores the field for these models.
        raise fields.wrong("partial_rotary_factor", f"{partial} is not supported with {rope_type}")
    original = fields.optional_integer("original_max_position_embeddings")
    if original is None:
        original = scaling.integer("original_max_position_embeddings", max_position_embeddings)
    common = RopeConfig(
        rope_type=rope_type,
        theta=scaling.number("rope_theta", theta),
        partial_rotary_factor=partial,
        original_max_position_embeddings=original,
    )
    rotary_dim = common.rotary_dim(head_dim)
    if rotary_dim % 2 or not rotary_dim:
        problem = f"{partial} of {head_dim} dims are {rotary_dim}, rotary embedding needs pairs"
        raise fields.wrong("partial_rotary_factor", problem)
    match rope_type:
        case "default":
            return common
        case "linear":
            return replace(common, factor=scaling.number("factor"))
        case "proportional":
            return replace(common, factor=scaling.number("factor", 1.0))
        case "dynamic":
            factor = scaling.number("factor")
            return replace(common, factor=factor, max_len=max_position_embeddings)
        case "llama3":
            return _llama3(common, scaling)
        case "yarn":
            return _yarn(common, scaling, max_position_embeddings / original)
        case _:
            ratio = max_position_embeddings / original
            return _longrope(common, scaling, ratio, rotary_dim // 2, max_model_len)


def _rope_type(scaling: Fields) -> str:
    name = "rope_type" if scaling.has("rope_type") or not scaling.has("type") else "type"
    rope_type = scaling.text(name, "default")
    if rope_type not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise scaling.wrong(name, f"{rope_type!r} is not supported; supported: {known}")
    return rope_type


def _llama3(common: RopeConfig, scaling: Fields) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.wrong("high_freq_factor", f"must exceed low_freq_factor, {high} <= {low}")
    factor = scaling.number("factor")
    return replace(common, factor=factor, low_freq_factor=low, high_freq_factor=high)


def _yarn(common: RopeConfig, scaling: Fields, ratio: float) -> RopeConfig:
    """Read RoPE of type YaRN (Peng et al., arXiv:2309.00071); ``ratio`` is the default factor."""
    factor = scaling.number("factor", ratio)
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        mscale = scaling.optional_number("mscale")
        mscale_all_dim = scaling.optional_number("mscale_all_dim")
        if mscale is not None and mscale_all_dim is not None:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return replace(
        common,
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    common: RopeConfig, scaling: Fields, ratio: float, num_pairs: int, max_model_len: int | None
) -> RopeConfig:
    """Read RoPE of type LongRoPE (Ding et al., arXiv:2402.13753); ``ratio``: the default factor."""
    original = common.original_max_position_embeddings
    assert original is not None
    if original < 2:  # its logarithm is a divisor
        raise scaling.wrong("original_max_position_embeddings", f"must exceed 1, got {original}")
    factor = scaling.number("factor", ratio)
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    use_long_factors = max_model_len is not None and max_model_len > original
    return replace(
        common,
        factor=factor,
        attention_factor=attention_factor,
        short_factor=scaling.numbers("short_factor", num_pairs),
        long_factor=scaling.numbers("long_factor", num_pairs),
        use_long_factors=use_long_factors,
        max_len=None if use_long_factors else original,
    )
