"""Staging: loads new weights on a separate thread while steps compute with the old weights.

Refuses to know: how weights are loaded, how they are used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.api.errors import BatonError
from engine.worker.drafting.make_drafting import AnyDrafter
from models.base import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model with loaded weights, and its drafter, if any."""

    model: CausalLM
    drafter: AnyDrafter | None


class Staging:
    """One attempt to load new weights, which begins when the object is made.

    Args:
        load: loads and checks the weights, on the new thread.

    Attributes:
        loaded: the new weights; None: they are not loaded yet, or not usable.
        problem: why the new weights are not usable; empty: they are usable; None: they are still
            being loaded.
    """

    def __init__(self, load: Callable[[], LoadedWeights]) -> None:
        self.loaded: LoadedWeights | None = None
        self.problem: str | None = None
        self._load = load
        threading.Thread(target=self._run, name="load-weights", daemon=True).start()

    def _run(self) -> None:
        try:
            self.loaded = self._load()
            self.problem = ""
        except BatonError as error:
            self.problem = str(error)
        except (MemoryError, torch.OutOfMemoryError):
            self.problem = "weights: do not fit in memory beside the old ones"
        except Exception as error:  # any error: the old weights stay in use
            logger.exception("new weights cannot be loaded")
            self.problem = f"weights: cannot be loaded: {error}"
