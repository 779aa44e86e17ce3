"""Map models that generate no text to the generating models with the same layers.

A family's file describes the generating model, for example ``Qwen3ForCausalLM``. Checkpoints may
also have the same layers without an output head (``Qwen3Model``), or with a head for labels
(``Qwen3ForSequenceClassification``).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from baton.api.errors import ModelLoadError
from baton.checkpoint.families import ARCHITECTURES

_MODEL, _LABELS, _TOKENS = "Model", "ForSequenceClassification", "ForCausalLM"
# Name of a text network, without ``Model`` -> name of the model that generates text with this
# network, without ``ForCausalLM``. Lists only networks for which the two names differ, because a
# model that takes images has the plain name.
_TEXT_NETWORKS = {"Gemma3Text": "Gemma3", "Gemma4Text": "Gemma4"}
MAX_LABELS = 4096


class Head(Enum):
    """Kinds of heads: what a model computes from its last hidden states."""

    TOKENS = "tokens"
    LABELS = "labels"
    NONE = "none"


def split_architecture(name: str) -> tuple[str, Head]:
    """Return the generating model with the same layers as a model, and the head in the checkpoint.

    Args:
        name: name of the model in ``architectures``; returned unchanged if it is not supported.
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
    """Return the labels of a model with a classification head, in the order of the head's logits.

    Args:
        get: returns a field of config.json, or None if the field is missing.

    Raises:
        ModelLoadError: the labels are not numbered from 0 on.
    """
    named = get("id2label")
    if named is None:  # transformers does not write default names
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
