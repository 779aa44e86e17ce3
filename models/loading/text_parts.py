"""Text parts: find the text network of a model that sees images, and its names in a checkpoint.

Refuses to know: how a text network computes, images.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

from models.family import TextPart
from models.fields import Fields

logger = logging.getLogger(__name__)
Stored = TypeVar("Stored")

# Fields of the whole model that also apply to its text part. For _TIED, the whole model's value
# overrides the text part's.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
_TIED = "tie_word_embeddings"
_ROPES = ("rope_scaling", "rope_parameters")
# Prefixes of the text network's names -> their prefixes in a text model. The last row has the
# names that transformers writes since version 4.52, the others older names.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
    "model.language_model.": "model.",
}
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.")


def text_fields(fields: Fields, *, is_tied: bool = False) -> Fields:
    """Return the text part's fields, with the whole model's fields that also hold for it.

    Args:
        fields: fields of a file with an object for the text part, or without (early Qwen2-VL).
        is_tied: whether the head uses the embedding's weight by default.
    """
    text = fields.child("text_config") if fields.has("text_config") else fields
    shared = {
        n: fields.get(n) for n in _OF_THE_WHOLE if n in fields.names() and n not in text.names()
    }
    shared["architectures"] = fields.get("architectures")
    shared[_TIED] = fields.boolean(_TIED, is_tied)
    return text.with_values(shared)


def text_part(fields: Fields, part: TextPart) -> tuple[str, Fields]:
    """Return the architecture of a model's text part, and its fields as in a text model.

    Args:
        fields: fields of the whole model's config.json.
        part: the entry in the family's file.

    Raises:
        ModelLoadError: the text network is not supported.
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


def _without_axes(rope: Fields) -> dict[str, object]:
    """Return a rotary embedding with three axes as a plain one, for text."""
    values = {n: rope.get(n) for n in rope.names() if not n.startswith("mrope_")}
    return {n: "default" if value == "mrope" else value for n, value in values.items()}


def text_name(name: str) -> str | None:
    """Return the name in a text model of a tensor or layer; None: it is of the image part."""
    if name.removeprefix("model.").startswith(_OF_IMAGES):
        return None
    prefix = next((begin for begin in _PREFIXES if name.startswith(begin)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def text_tensors(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a model's text part, under their names in a text model.

    Tensors for images are left out, which is logged once.
    """
    names = {name: text_name(name) for name in stored}
    left_out = [name for name, renamed in names.items() if renamed is None]
    if left_out:
        logger.info(
            "not loaded, as images are not computed: %d tensors, such as %s",
            len(left_out),
            left_out[0],
        )
    return {renamed: stored[name] for name, renamed in names.items() if renamed is not None}
