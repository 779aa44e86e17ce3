"""EarlyReaders: what a router loads and forks before it starts threads.

The processes that read requests then share the router's modules and tokenizer.
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
    """Hold a router's tokenizer, and templates of the processes that read requests.

    Attributes:
        tokenizer: None for a checkpoint without one.
        texts, grammars: for `Texts` and `GrammarTrials`; None if forking was not possible.
    """

    tokenizer: Tokenizer | None
    texts: EarlyTemplate | None = None
    grammars: EarlyTemplate | None = None


def fork_readers(options: TextOptions, folder: Path) -> EarlyReaders:
    """Load a checkpoint's tokenizer and fork the templates; call before threads start.

    Raises:
        ModelLoadError: the tokenizer is broken.
        ConfigError: the given chat template is invalid.
    """
    tokenizer = options.make_tokenizer(folder)
    if tokenizer is None or not may_fork():
        return EarlyReaders(tokenizer)
    texts = grammars = None
    with contextlib.suppress(OSError):  # out of a resource: `PromptReader.start` reports it
        texts = fork_texts(tokenizer)
        grammars = fork_trials(folder)
    return EarlyReaders(tokenizer, texts, grammars)
