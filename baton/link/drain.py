"""Drain: brings a node to rest without losing requests.

    SERVING -> DRAINING -> DRAINED        (and back, when told to serve again)

A draining node says so in its beats, and every router answers that it has seen it. A link keeps its
order, so nothing that the router placed before is still on its way then. So DRAINED is exact: no
router places anything more, and no request, transfer or block that a peer may write is left.
"""

from __future__ import annotations

import asyncio
import dataclasses

from baton.link.words import NodeBeat, ServingState


class Drain:
    """Hold the serving state of one node, on its asyncio loop.

    Attributes:
        state: state for the next beat.
        drained: event that is set while the state is ``DRAINED``.
    """

    def __init__(self) -> None:
        self.state = ServingState.SERVING
        self.drained = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Return whether the node accepts new requests."""
        return self.state is ServingState.SERVING

    def begin(self) -> None:
        """Start draining; harmless if the node drains already."""
        if self.state is ServingState.SERVING:
            self.state = ServingState.DRAINING

    def resume(self) -> None:
        """Serve again."""
        self.state = ServingState.SERVING
        self.drained.clear()

    def mark(self, beat: NodeBeat, *, all_routers_know: bool) -> NodeBeat:
        """Return the beat with the serving state; ends the drain if nothing is open."""
        if self.state is not ServingState.SERVING:
            is_quiet = all_routers_know and not _num_open(beat)
            # A router that joins a drained node must see the drain too, which takes a moment.
            self.state = ServingState.DRAINED if is_quiet else ServingState.DRAINING
            (self.drained.set if is_quiet else self.drained.clear)()
        return dataclasses.replace(beat, serving_state=self.state)


def _num_open(beat: NodeBeat) -> int:
    return (
        beat.num_waiting
        + beat.num_waiting_for_remote_kvs
        + beat.num_running
        + beat.num_transfers
        + beat.num_quarantined_blocks
    )
