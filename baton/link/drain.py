"""Drain: takes a node out of service without losing requests.

    SERVING -> DRAINING -> DRAINED        (and back, when told to serve again)

A draining node's beats carry its serving state, and every router confirms the drain with
`DrainSeen`. Links keep the order of messages, so after the confirmation none of the router's
earlier requests is in transit. DRAINED is therefore exact: no router places requests any more, and
the node has no requests, no transfers, and no blocks that a peer may still write.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from baton.link.words import NodeBeat, ServingState

logger = logging.getLogger(__name__)


class Drain:
    """The serving state of one node, on its asyncio loop.

    Args:
        on_change: called when the node begins to drain, or serves again.

    Attributes:
        state: serving state that the next beat reports.
        drained: event that is set while the state is ``DRAINED``.
        is_locked: whether `resume` has no effect, because this node could not serve.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.state = ServingState.SERVING
        self.drained = asyncio.Event()
        self.is_locked = False

    @property
    def is_serving(self) -> bool:
        """Return whether the node accepts new requests."""
        return self.state is ServingState.SERVING

    def begin(self) -> None:
        """Start draining; do nothing if the node already drains."""
        if self.state is ServingState.SERVING:
            self.state = ServingState.DRAINING
            self._on_change()

    def resume(self) -> None:
        """Serve again, unless that is impossible now."""
        if self.is_locked:
            logger.warning("serves no requests yet: its weights change, or it sleeps")
            return
        self.state = ServingState.SERVING
        self.drained.clear()
        self._on_change()

    def mark(self, beat: NodeBeat, *, all_routers_know: bool) -> NodeBeat:
        """Return the beat with the serving state, which becomes DRAINED if nothing is open."""
        if self.state is not ServingState.SERVING:
            is_quiet = all_routers_know and not beat.num_open
            # A router that joins a drained node must first learn of the drain.
            self.state = ServingState.DRAINED if is_quiet else ServingState.DRAINING
            (self.drained.set if is_quiet else self.drained.clear)()
        return dataclasses.replace(beat, serving_state=self.state)
