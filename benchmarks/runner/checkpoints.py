"""Writes random checkpoints of given shapes, for figures that depend on shapes only."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.environment import DEMO_MODEL


def random_checkpoint(
    folder: Path,
    architecture: str,
    shape: Mapping[str, Any],
    dtype: str = "float32",
    *,
    with_tokenizer: bool = False,
) -> Path:
    """Write a checkpoint with random weights unless it exists; return its folder.

    Args:
        architecture: name of a class in `transformers`.
        shape: fields of the class's configuration.
        with_tokenizer: whether to add the demo model's tokenizer, which converters need.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, architecture)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model_class(model_class.config_class(**shape)).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    for path in DEMO_MODEL.glob("tokenizer*") if with_tokenizer else ():
        shutil.copy(path, folder)
    return folder


def ids_of(tokens: Iterable[str]) -> dict[str, int]:
    """Return a vocabulary: tokens with consecutive ids."""
    return {token: number for number, token in enumerate(tokens)}


def tokenizer_document(
    model: Mapping[str, object], specials: Sequence[str] = (), **parts: object
) -> dict[str, object]:
    """Return the content of tokenizer.json.

    Args:
        specials: special tokens, which come first.
        parts: further parts by name: normalizer, pre_tokenizer, decoder.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": text, "special": True, **flags}
        for number, text in enumerate(specials)
    ]
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {
        "version": "1.0",
        **dict.fromkeys(names),
        **parts,
        "added_tokens": added,
        "model": model,
    }
