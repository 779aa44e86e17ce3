"""WorkerWeights: replaces the weights of a worker, and frees its memory for a sleep.

                   begin          use
    old weights ────────> staged ─────> new weights          drop: staged ──> old weights
                  sleep                                       begin + use, or wake
    awake ───────────────> asleep ──────────────────────────> awake

On a CPU, weights are in host memory anyway, so a sleep that keeps the weights frees only the memory
of the KV cache. Refuses to know: files, requests, how a model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from baton.api.changes import SleepLevel
from baton.api.errors import InvalidRequestError
from engine.worker.kv_cache import KVMemory
from engine.worker.weights.staging import LoadedWeights, Staging
from models.base import CausalLM
from models.layers.linear import QuantizedLinear
from models.loading.stored_weights import release_pages


class WorkerWeights:
    """The weights of one worker. Used by the thread that computes, between steps.

    Args:
        memory: memory of the KV cache, whose content is dropped when the weights change.
        loaded: the weights in use.
        load: loads weights from a folder, on any thread; raises BatonError if they are unusable.
        use: makes the worker compute with the given weights; called with None to free the model.
    """

    def __init__(
        self,
        memory: KVMemory,
        loaded: LoadedWeights,
        load: Callable[[Path, bool], LoadedWeights],
        use: Callable[[LoadedWeights | None], None],
    ) -> None:
        self._memory, self._load, self._use_weights = memory, load, use
        self._loaded: LoadedWeights | None = loaded
        self._computes = True  # whether the worker computes with `_loaded`
        self._kv_scales = loaded.model.kv_scales
        self._staging: Staging | None = None
        self._kv_bytes = memory.tensor.nbytes

    def begin(self, folder: Path, *, is_kept: bool) -> None:
        """Begin to load new weights from a folder, beside the old ones."""
        self._staging = Staging(lambda: self._load_fitting(folder, is_kept))

    @property
    def problem(self) -> str | None:
        """Return why new weights cannot be used; empty: they can; None: they are still loading."""
        assert self._staging is not None, "no weights were begun"
        return self._staging.problem

    def use(self) -> None:
        """Replace the old weights by the new ones, and free the old ones."""
        assert self._staging is not None, "no weights were begun"
        loaded = self._staging.loaded
        assert loaded is not None, self._staging.problem
        self._take_kv_memory()
        self._let_go()
        self._loaded, self._staging = loaded, None
        self._compute_with(loaded)

    def drop(self) -> None:
        """Drop the new weights without using them."""
        self._staging = None

    def sleep(self, level: SleepLevel, *, keeps_kv_memory: bool = False) -> None:
        """Free the KV cache's memory (unless ``keeps_kv_memory``), and weights as ``level`` says.

        Raises InvalidRequestError, with nothing changed, if the weights cannot move to the host.
        """
        loaded, tensor = self._loaded, self._memory.tensor
        assert loaded is not None, "asleep already"
        if level is SleepLevel.HOST and tensor.is_cuda:
            _check_moves(loaded.model)
            self._let_go()
            _module(loaded.model).to("cpu")
        elif level is SleepLevel.DROPPED:
            self._loaded = None
            self._let_go()
        del loaded
        if keeps_kv_memory:
            return
        if tensor.is_cuda:
            tensor.untyped_storage().resize_(0)
            torch.cuda.empty_cache()
        else:
            release_pages(tensor)  # its pages then read as zeros

    def wake(self) -> None:
        """Allocate what a sleep freed, and compute again with the weights that it kept."""
        assert self._loaded is not None, "the weights were dropped"
        self._take_kv_memory()
        if self._memory.tensor.is_cuda:
            _module(self._loaded.model).to(self._memory.tensor.device)
            self._compute_with(self._loaded)

    def _compute_with(self, loaded: LoadedWeights) -> None:
        self._use_weights(loaded)
        self._computes = True

    def _let_go(self) -> None:
        """Free the old weights, if the worker still computes with them."""
        if self._computes:
            self._use_weights(None)
        self._computes = False

    def _take_kv_memory(self) -> None:
        """Allocate the KV cache's memory again, if a sleep freed it."""
        storage = self._memory.tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._kv_bytes)
            self._memory.tensor.zero_()

    def _load_fitting(self, folder: Path, is_kept: bool) -> LoadedWeights:
        """Load weights; raise a BatonError if they are unusable or do not fit the KV cache."""
        loaded = self._load(folder, is_kept)
        if loaded.model.kv_scales != self._kv_scales:
            raise InvalidRequestError(
                "weights", "have other scales of keys and values than those that serve"
            )
        return loaded


def _module(model: CausalLM) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _check_moves(model: CausalLM) -> None:
    """Raise InvalidRequestError if a layer's weights cannot be moved to the host."""
    if any(isinstance(one, QuantizedLinear) for one in _module(model).modules()):
        raise InvalidRequestError(
            "level", "must be dropped, as weights of few bits stay on the GPU, got host"
        )
