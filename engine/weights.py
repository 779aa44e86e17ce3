"""ServedWeights: the weights that an engine serves, and their replacement while it runs.

    begin   all ranks load the new weights beside the old ones, while steps go on
    use     the new weights compute, once no request is open; cached KV is forgotten
    drop    the old weights stay

    sleep   memory is given back, once no request is open; `wake`, or `begin` and `use`, end it

A version is the digest of the weights' files. Hashes of cached KV blocks include the version. Used
on the engine's thread. Refuses to know: tensors, callers that wait.
"""

from __future__ import annotations

import logging
from pathlib import Path

from baton.api.changes import SleepLevel
from baton.api.errors import InvalidRequestError
from baton.checkpoint.new_weights import NewWeights, served_weights
from engine.engine import Engine
from engine.speculation.speculation import drafter_identity

logger = logging.getLogger(__name__)


class ServedWeights:
    """The weights of one engine, and their replacement.

    Args:
        folder: folder of the model, which has its configuration.

    Attributes:
        folder: the argument, or the folder of later weights.
        is_asleep: whether the engine sleeps, so that it can compute nothing.
        keeps_weights: whether the weights are in memory, on the device or on the host.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.folder = folder
        self.is_asleep = False
        self._engine = engine
        self._served = served_weights(folder)
        self._new: NewWeights | None = None
        self.keeps_weights = True

    @property
    def digest(self) -> str:
        """Return the version of the served weights."""
        return self._served.digest

    def has(self, new: NewWeights) -> bool:
        """Return whether ``new`` has the weights that are served or being loaded."""
        return new is self._served or new is self._new

    def begin(self, new: NewWeights) -> None:
        """Begin to load new weights; see `is_ready`.

        Raises InvalidRequestError while other weights are being loaded.
        """
        if self._new is not None:
            raise InvalidRequestError("weights", "others are being loaded; wait for them")
        self._engine.executor.collective_rpc("begin_weights", (str(new.folder), new.is_kept))
        self._new = new

    def is_ready(self) -> bool:
        """Return whether the new weights are loaded and checked on all ranks.

        Raises InvalidRequestError if the new weights cannot be used; the caller must then `drop`
        them.
        """
        assert self._new is not None, "no weights were begun"
        problems = self._engine.executor.collective_rpc("weights_problem")
        problem = next(filter(None, problems), "")
        if problem and None not in problems:
            shown = problem.replace(str(self._new.folder), self._new.source)
            raise InvalidRequestError("weights", shown.removeprefix("weights: "))
        return None not in problems

    def use(self) -> str:
        """Replace the served weights by the loaded ones; return the new version.

        Call this once the new weights are ready and no request is open.
        """
        engine, new = self._engine, self._new
        assert new is not None, "no weights were begun"
        self._check_idle()
        engine.adapters.clear()  # packed adapters may fit only the old weights
        engine.executor.collective_rpc("use_weights")
        engine.adapters.is_suspended = False
        if self._served is not new:
            self._served.close()
        self._served, self._new = new, None
        self.is_asleep, self.keeps_weights = False, True
        entries = {**engine.compatibility, "weights": new.digest}
        if "drafter" in entries:
            entries["drafter"] = drafter_identity(engine.executor.config, new.folder)
        engine.rename_cache(entries)
        logger.info("serves the weights %s of %s", new.digest, new.source)
        return new.digest

    def drop(self) -> None:
        """Drop new weights that are loaded but not used; do nothing if there are none."""
        if self._new is not None:
            self._engine.executor.collective_rpc("drop_weights")
            if self._new is not self._served:
                self._new.close()
            self._new = None

    def sleep(self, level: SleepLevel, *, keeps_kv_memory: bool = False) -> None:
        """Free the memory of the KV cache and of the weights; call this once no request is open.

        Args:
            keeps_kv_memory: whether to keep the KV cache's memory allocated, and only drop its
                content.

        Raises InvalidRequestError if the weights cannot be moved to the host; then only the prefix
        cache has changed: it is empty.
        """
        self._check_idle()
        if self.is_asleep:
            raise InvalidRequestError("sleep", "the engine is asleep already")
        if level is SleepLevel.DROPPED:  # unload adapters before the workers free the model
            self._engine.adapters.clear()
            self._engine.adapters.is_suspended = True
        # First, so that no block is written to a file whose memory the workers have dropped.
        self._engine.block_pool.reset_prefix_cache()
        with self._engine.features.block_file_copies():
            self._engine.executor.collective_rpc("sleep", (level.value, keeps_kv_memory))
        self.is_asleep, self.keeps_weights = True, level is not SleepLevel.DROPPED
        self._engine.features.forget_cached()
        logger.info("sleeps; its weights are %s", "kept" if self.keeps_weights else "dropped")

    def wake(self) -> bool:
        """End a sleep; return False if the weights must first be loaded again.

        If the weights were dropped, begins to load them; the caller must `use` them once they are
        ready.

        Raises InvalidRequestError if the weights' files have changed.
        """
        if not self.is_asleep:
            return True
        if not self.keeps_weights:
            found = served_weights(self._served.folder).digest
            if found != self.digest:
                problem = f"{self._served.source}: has changed; update to it to serve {found}"
                raise InvalidRequestError("weights", problem)
            self.begin(self._served)
            return False
        self._engine.executor.collective_rpc("wake")
        self.is_asleep = False
        return True

    def close(self) -> None:
        """Remove temporary folders of loaded weights; afterwards no weights can be loaded."""
        self._served.close()
        if self._new is not None:
            self._new.close()

    def _check_idle(self) -> None:
        engine = self._engine
        assert not engine.requests, "requests are open"
        assert not engine.step_in_flight, "a step is in flight"
