"""Early grammars: loads and forks what grammars need before the node has threads. No torch."""

from __future__ import annotations

import logging

from baton.api.errors import BatonError
from baton.checkpoint.model_folder import find_local_folder
from baton.processes.early_template import may_fork
from baton.text.grammar_trials import EarlyGrammars, fork_grammars
from models.config import ModelConfig

logger = logging.getLogger(__name__)


def fork_early_grammars(model: str) -> EarlyGrammars | None:
    """Load a model's tokenizer for grammars, and fork the template process of the trials.

    Call this before the program starts any thread.

    Returns:
        The grammar parts. None if threads have started, or if the model is not here or not usable;
        loading the model will report why.
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
