"""Sampling defaults: the sampling parameters in a checkpoint's `generation_config.json`.

The parameters that a request gives override the checkpoint's, and the checkpoint's override Baton's
defaults. The end-of-sequence tokens in the file end every output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.api.bounded_files import read_object
from baton.api.errors import InvalidRequestError, ModelLoadError
from baton.api.sampling_params import SamplingParams

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's sampling parameters by field of `SamplingParams`; may be empty.

    Raises:
        ModelLoadError: the file is broken or has a value out of range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    content = read_object(path)
    defaults = {name: content[name] for name in _NAMES if content.get(name) is not None}
    if "top_k" in defaults:
        defaults["top_k"] = _top_k(defaults["top_k"])
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelLoadError(f"model: {path}: {error}") from error
    return defaults


def read_end_token_ids(folder: Path) -> frozenset[int]:
    """Return the ids of the tokens that end an output, as `models.config` reads them; may be empty.

    Raises:
        ModelLoadError: a file is broken or has a value that is no token id.
    """
    config, generation = folder / "config.json", folder / "generation_config.json"
    whole = read_object(config)
    of_text = whole.get("text_config")
    # The fields of the text part override the fields of the whole model.
    fields = {**whole, **of_text} if isinstance(of_text, dict) else whole
    ends = set(_token_ids(fields, config))
    if generation.is_file():
        ends.update(_token_ids(read_object(generation), generation))
    return frozenset(ends)


def _token_ids(content: Mapping[str, Any], path: Path) -> list[int]:
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(one) is not int or one < 0 for one in ids):
        raise ModelLoadError(f"model: {path}: eos_token_id must be token ids, got {value!r:.60}")
    return ids


def _top_k(value: Any) -> Any:
    """Convert a top-k from notations that checkpoints use: -1 (off) to 0, and 20.0 to 20."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_off = isinstance(value, int) and not isinstance(value, bool) and value == -1
    return 0 if is_off else value
