"""Loads a model folder in Hugging Face layout as a torch module that runs on paged KV.

Refuses to know: requests, schedulers, samplers, tokenizers, computer networks. Torch is imported
when `load_model` is first used, so that programs without torch can read ``ModelConfig``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.registry import MODELS
from models.rope_config import RopeConfig

if TYPE_CHECKING:
    from models.loading.loader import load_model


if not TYPE_CHECKING:  # type checkers read the import of load_model above instead of this function

    def __getattr__(name: str) -> object:
        """Import `load_model`, and torch with it, on first use."""
        if name != "load_model":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from models.loading.loader import load_model

        return load_model


__all__ = ["MODELS", "ModelConfig", "RopeConfig", "load_model"]
