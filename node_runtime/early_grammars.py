"""Early grammars: what a node loads and forks for grammars before it has threads. No torch."""

from __future__ import annotations

import logging

from baton.api.errors import BatonError
from baton.checkpoint.model_folder import find_local_folder
from baton.processes.early_template import may_fork
from baton.text.grammar_trials import EarlyGrammars, fork_grammars
from models.config import ModelConfig

logger = logging.getLogger(__name__)


def fork_early_grammars(model: str) -> EarlyGrammars | None:
    """Load a model's tokenizer for grammars and fork the template of the trials, which shares it.

    Call this before the program begins its threads.

    Returns:
        None where threads have begun, or the model is still to be fetched or cannot be used:
        whoever loads it will say why.
    """
    if not may_fork():
        return None
    try:
        folder = find_local_folder(model)
        if folder is None or not (folder / "tokenizer.json").is_file():
            return None
        return fork_grammars(folder, ModelConfig.from_folder(folder).eos_token_ids)
    except (BatonError, OSError) as error:
        logger.debug("grammars are loaded later: %s", error)
        return None
