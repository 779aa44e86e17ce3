"""EarlyReaders: what a router loads and forks before it has threads.

The processes that read requests then share the router's modules and its tokenizer.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from baton.processes.early_template import EarlyTemplate, may_fork
from baton.text.grammar_trials import fork_trials
from baton.text.tokenizer import Tokenizer
from router.intake.text_options import TextOptions
from router.intake.texts import fork_texts


@dataclass(frozen=True, slots=True)
class EarlyReaders:
    """A router's tokenizer, and templates of the processes that read requests.

    Attributes:
        tokenizer: None for a checkpoint without one.
        texts, grammars: for `Texts` and `GrammarTrials`; None where none could be forked.
    """

    tokenizer: Tokenizer | None
    texts: EarlyTemplate | None = None
    grammars: EarlyTemplate | None = None


def fork_readers(options: TextOptions, folder: Path) -> EarlyReaders:
    """Load a checkpoint's tokenizer and fork the templates; call this before threads begin.

    Raises:
        ModelLoadError: the tokenizer is broken.
        ConfigError: the chat template that was given cannot be used.
    """
    tokenizer = options.make_tokenizer(folder)
    if tokenizer is None or not may_fork():
        return EarlyReaders(tokenizer)
    texts = grammars = None
    with contextlib.suppress(OSError):  # a resource is missing: `Intake.start` will say so
        texts = fork_texts(tokenizer)
        grammars = fork_trials(folder)
    return EarlyReaders(tokenizer, texts, grammars)
