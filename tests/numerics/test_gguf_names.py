"""Test that Baton reads GGUF files of all its architectures for which GGUF has a name."""

from __future__ import annotations

import gguf
from transformers.models.auto import modeling_auto

from baton.checkpoint.gguf.table import ARCHITECTURES
from models.registry import MODELS

# Classes of transformers by the model type in config.json.
CLASSES = {
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}


def plain(name: str) -> str:
    return name.removesuffix("_text").replace("_", "").replace("-", "").lower()


def test_no_architecture_is_read_from_safetensors_alone() -> None:
    types = {plain(kind) for kind, name in CLASSES.items() if name in MODELS.names()}
    named = {plain(name): name for name in gguf.MODEL_ARCH_NAMES.values()}
    assert len(types & named.keys()) > 15
    unread = {named[one] for one in types & named.keys()} - set(ARCHITECTURES.names())
    assert not unread
