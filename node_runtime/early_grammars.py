"""Early grammars: before the node starts threads, loads and forks what grammars need; no torch."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path

from llguidance import LLTokenizer

from baton.api.errors import BatonError
from baton.checkpoint.model_folder import find_local_folder
from baton.processes.early_template import may_fork
from baton.text.grammar_trials import EarlyGrammars, fork_grammars
from baton.text.grammars import load_grammar_tokenizer
from models.config import ModelConfig

logger = logging.getLogger(__name__)


def load_early_tokenizer(model: str) -> None:
    """Load a model's tokenizer for grammars into this process, so that its forks share it.

    Does nothing if the model is missing or unusable: loading the model will report the reason.
    """
    with _reported():
        _tokenizer_of(model)


def fork_early_grammars(model: str) -> EarlyGrammars | None:
    """Load a model's tokenizer for grammars, and fork the process that tries grammars.

    Call this before the program starts any thread.

    Returns:
        The tokenizer and the process. None if threads have started already, or if the model is
        missing or unusable; in the latter case, loading the model will report why.
    """
    if not may_fork():
        return None
    with _reported():
        tokenizer = _tokenizer_of(model)
        return None if tokenizer is None else fork_grammars(tokenizer)
    return None


def _tokenizer_of(model: str) -> LLTokenizer | None:
    folder = find_local_folder(model)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    return _load(folder / "tokenizer.json", ModelConfig.from_folder(folder).eos_token_ids)


@functools.cache
def _load(path: Path, eos_token_ids: frozenset[int]) -> LLTokenizer:
    return load_grammar_tokenizer(path, eos_token_ids)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Log errors of this context only at debug level, because loading the model reports them."""
    try:
        yield
    except (BatonError, OSError) as error:
        logger.debug("grammars are loaded later: %s", error)
