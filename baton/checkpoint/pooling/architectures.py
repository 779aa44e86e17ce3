"""Map models without an output head, or with labels, to generating models with the same layers.

A family's file describes its generating model. The same layers are also saved as ``Qwen3Model``,
without a head, and as ``Qwen3ForSequenceClassification``, with a head for labels.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from baton.api.errors import ModelLoadError
from baton.checkpoint.families import ARCHITECTURES

_MODEL, _LABELS, _TOKENS = "Model", "ForSequenceClassification", "ForCausalLM"
# Prefix of a text network's name -> prefix of its generating model's name, where the two differ
# because the plain name belongs to a model that takes images.
_TEXT_NETWORKS = {"Gemma3Text": "Gemma3"}
MAX_LABELS = 4096


class Head(Enum):
    """Kinds of output that a model computes from its last hidden states."""

    TOKENS = "tokens"
    LABELS = "labels"
    NONE = "none"


def split_architecture(name: str) -> tuple[str, Head]:
    """Return the generating model with the same layers, and the head that is saved.

    A name that belongs to no supported family is returned as it is.
    """
    for end, head in ((_LABELS, Head.LABELS), (_MODEL, Head.NONE)):
        stem = name.removesuffix(end)
        if stem == name or stem in _TEXT_NETWORKS.values():
            continue
        generating = _TEXT_NETWORKS.get(stem, stem) + _TOKENS
        if generating in ARCHITECTURES:
            return generating, head
    return name, Head.TOKENS


def read_labels(get: Callable[[str], object]) -> tuple[str, ...]:
    """Return the labels of a model with a head for them, in the order of its logits.

    Args:
        get: returns a field of config.json, or None.

    Raises:
        ModelLoadError: the labels are not numbered from 0 on.
    """
    named = get("id2label")
    if named is None:  # transformers omits the names LABEL_0 and LABEL_1 of two labels
        count = get("num_labels")
        count = 2 if count is None else count
        if type(count) is not int or not 1 <= count <= MAX_LABELS:
            problem = f"must be a number from 1 to {MAX_LABELS}, got {count!r:.60}"
            raise ModelLoadError(f"config.json: num_labels: {problem}")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(named, dict) or not 1 <= len(named) <= MAX_LABELS:
        raise ModelLoadError(f"config.json: id2label: must be an object of 1 to {MAX_LABELS} names")
    labels = [named.get(str(index)) for index in range(len(named))]
    if not all(isinstance(label, str) for label in labels):
        raise ModelLoadError("config.json: id2label: must have a name for each number from 0 on")
    return tuple(map(str, labels))
