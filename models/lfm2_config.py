"""LFM2's config.json in the words of the others. Refuses to know: tensors."""

from __future__ import annotations

from dataclasses import dataclass

from models.fields import MAX_PARTS, Fields


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Gated short convolutions of layers.

    Attributes:
        kernel_size: inputs that a token sees, its own included.
        bias: whether convolution and projections have one.
    """

    kernel_size: int
    bias: bool


def common_fields(fields: Fields) -> Fields:
    """Return the fields by the names that other families have for them.

    Raises:
        ModelLoadError: a field is of the wrong type.
    """
    values: dict[str, object] = {
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "intermediate_size": _intermediate_size(fields),
        "layer_types": _layer_types(fields),
    }
    name = "tie_embedding" if fields.has("tie_embedding") else "tie_word_embeddings"
    values["tie_word_embeddings"] = fields.boolean(name, True)
    return fields.with_values(values)


def parse_short_conv(fields: Fields) -> ShortConvConfig:
    """Read the fields ``conv_...``."""
    return ShortConvConfig(
        kernel_size=fields.integer("conv_L_cache", 3, minimum=2),
        bias=fields.boolean("conv_bias", False),
    )


def _intermediate_size(fields: Fields) -> int:
    name = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"
    size = fields.integer(name)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = "block_ffn_dim_multiplier"
    if multiplier in fields.names() and not fields.has(multiplier):  # null is not the default
        return size
    size = int(fields.number(multiplier, 1.0) * size)
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def _layer_types(fields: Fields) -> list[str]:
    if fields.has("layer_types"):
        return list(fields.texts("layer_types"))
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_PARTS)
    attending = set(range(num_layers))
    if fields.has("full_attn_idxs"):
        attending = set(fields.token_ids("full_attn_idxs"))
    return ["full_attention" if layer in attending else "conv" for layer in range(num_layers)]
