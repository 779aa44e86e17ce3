"""Finds the text part of a model that reads images: its configuration and its tensors.

Refuses to know: how networks compute.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TypeVar

from models.family import TextPart
from models.fields import Fields

logger = logging.getLogger(__name__)
Stored = TypeVar("Stored")

# Fields of the whole model that also apply to its text part. The whole model's value of _TIED
# overrides the text part's value.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
_TIED = "tie_word_embeddings"
_ROPES = ("rope_scaling", "rope_parameters")
# Prefixes of the text part's tensors in checkpoints -> prefixes in a model for text only.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
_HEADS = ("lm_head.", "score.")
# Older checkpoints have the name of SigLIP's module in their names; transformers 5 leaves it out.
_TOWER, _TOWER_BEFORE = "vision_tower.", "vision_tower.vision_model."
_OF_IMAGES = (
    *("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector."),
    "embed_vision.",
)
# Prefix that Baton gives to the names of a vision encoder's tensors.
VISION = "vision."


def text_fields(fields: Fields, *, is_tied: bool = False) -> Fields:
    """Return the text part's fields, plus those of the whole model that apply to the text part.

    Args:
        fields: fields of config.json; the text part's are in ``text_config``, or (early Qwen2-VL)
            among the other fields.
        is_tied: whether the output head uses the embedding's weight if the file does not say.
    """
    text = fields.child("text_config") if fields.has("text_config") else fields
    shared = {
        n: fields.get(n) for n in _OF_THE_WHOLE if n in fields.names() and n not in text.names()
    }
    shared["architectures"] = fields.get("architectures")
    shared[_TIED] = fields.boolean(_TIED, is_tied)
    return text.with_values(shared)


def text_part(fields: Fields, part: TextPart) -> tuple[str, Fields]:
    """Return the architecture and the fields of a model's text part.

    The fields are those that the config.json of a text model would have.


    Args:
        fields: fields of the whole model's config.json.
        part: the family's description of the model.

    Raises:
        ModelLoadError: the text part is not supported.
    """
    fields = text_fields(fields, is_tied=part.is_tied)
    architecture = part.architecture
    if architecture is None:
        kind = fields.text("model_type", next(iter(part.by_type)))
        if kind not in part.by_type:
            supported = ", ".join(part.by_type)
            raise fields.wrong("model_type", f"{kind!r} is not supported; supported: {supported}")
        architecture = part.by_type[kind]
    values = {n: value for n, value in part.defaults.items() if n not in fields.names()}
    ropes = {n: _without_axes(fields.child(n)) for n in _ROPES if fields.get(n)}
    return architecture, fields.with_values({**values, **ropes, "architectures": [architecture]})


def rope_fields(fields: Fields) -> Fields:
    """Return the text part's section about RoPE, preferably ``rope_scaling``; empty: none."""
    text = fields.child("text_config") if fields.has("text_config") else fields
    return next((text.child(name) for name in _ROPES if text.get(name)), Fields({}, ""))


def _without_axes(rope: Fields) -> dict[str, object]:
    """Turn the section of a RoPE with three axes into one with one axis, for text only."""
    values = {n: rope.get(n) for n in rope.names() if not n.startswith("mrope_")}
    return {n: "default" if value == "mrope" else value for n, value in values.items()}


def with_vision_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return all tensors, and put `VISION` before the names of the vision encoder's tensors."""

    return {_vision_name(name) or name: one for name, one in stored.items()}


def _vision_name(name: str) -> str | None:
    """Return the name that Baton gives to a vision encoder's tensor; None: it is another tensor."""
    of_vision = name.removeprefix("model.")
    if not of_vision.startswith(_OF_IMAGES):
        return None
    if of_vision.startswith(_TOWER_BEFORE):
        of_vision = _TOWER + of_vision.removeprefix(_TOWER_BEFORE)
    return VISION + of_vision


def text_name(name: str) -> str | None:
    """Return a tensor's or layer's name in a model for text only; None: a vision part's name."""
    if _vision_name(name) is not None:
        return None
    prefix = next((begin for begin in _PREFIXES if name.startswith(begin)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def text_tensors(stored: Mapping[str, Stored], *, images: bool = False) -> dict[str, Stored]:
    """Return the tensors of the text part, under their names in a model for text only.

    Args:
        stored: the tensors of the whole model, by name.
        images: whether to return the vision encoder's tensors, too, under names that begin with
            `VISION`; otherwise, they are left out, and one line is logged.
    """
    kept: dict[str, Stored] = {}
    left_out: list[str] = []
    for name, tensor in stored.items():
        renamed = text_name(name)
        if renamed is None and images:
            renamed = _vision_name(name)
        if renamed is None:
            left_out.append(name)
        else:
            kept[renamed] = tensor
    if left_out:
        logger.info(
            "not loaded, as images are not computed: %d tensors, such as %s",
            len(left_out),
            left_out[0],
        )
    return kept


def with_prefix(
    stored: Mapping[str, Stored], prefix: str, expected: Collection[str]
) -> dict[str, Stored]:
    """Add the prefix to all names if the model was saved without its output head.

    Models for embeddings are saved like this: their names lack the prefix.

    Args:
        stored: the tensors, by name.
        prefix: the prefix, such as ``model.``.
        expected: names of the tensors of a model with an output head.
    """
    if any(name in expected and not name.startswith(_HEADS) for name in stored):
        return dict(stored)
    return {name if name.startswith(_HEADS) else prefix + name: one for name, one in stored.items()}
