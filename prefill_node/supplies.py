"""Supplies: the encodings and cached prefixes that other nodes send for a prefill node's prompts.

    command -> the prompt waits -> received or lost -> this node computes what is missing

This object also handles the cached prefixes that this node sends to other nodes. Refuses to know:
steps, decode nodes.
"""

from __future__ import annotations

import dataclasses

from baton.kv.encodings import holds_encodings
from baton.link.words import AbortAll, PrefillCommand, ShareCommand
from baton.telemetry.ledger import BlockHolding, Ledger
from engine.core.request import Request
from kvconnector.base import HandoffMetrics
from kvconnector.peer_info import PeerInfo
from node_runtime.inbox import Outbox, SideWork
from node_runtime.prefixes.prefix_wait import PrefixWait
from node_runtime.prefixes.prefixes import Prefixes
from prefill_node.arrivals import Arrivals, PromptWait


class Supplies(SideWork):
    """The encodings and prefixes that one prefill node receives. Used on the node's thread.

    Args:
        arrivals: receives encodings from encode nodes; None: this node encodes all images.
        prefixes: receives and sends cached prefixes; None: this node exchanges none.
    """

    def __init__(self, arrivals: Arrivals | None = None, prefixes: Prefixes | None = None) -> None:
        self.arrivals, self.prefixes = arrivals, prefixes or Prefixes()

    # ------------------------------------------------------------------ prompts

    def expect(
        self, request: Request, command: PrefillCommand, received_at: float
    ) -> tuple[PromptWait | None, PrefixWait | None]:
        """Let a new request wait for encodings and for a prefix; return both waits, for a receipt.

        Call this before the engine gets the request. A wait is None if no node sends anything.
        """
        encodings = None
        if self.arrivals is not None:
            encodings = self.arrivals.expect(request, command, received_at)
        return encodings, self.prefixes.expect_prefix(request, command, received_at)

    def cancel(self, request_id: str, epoch: int) -> None:
        """Expect no encodings and no prefix any more for a request that has ended."""
        if self.arrivals is not None:
            self.arrivals.cancel(request_id, epoch)
        self.prefixes.cancel(request_id, epoch)

    # ------------------------------------------------------------------ peers

    def add_peer(self, peer: PeerInfo) -> bool:
        """Connect an encode node, or a node's end for prefixes; return False for other peers."""
        if holds_encodings(peer.manifest):
            if self.arrivals is not None:
                self.arrivals.incoming.add_peer(peer)
            return True
        return self.prefixes.add_peer(peer)

    def lose_peer(self, engine_id: str) -> None:
        """End the transfers of encodings and prefixes with a departed node."""
        if self.arrivals is not None:
            self.arrivals.incoming.lose_peer(engine_id)
        self.prefixes.lose_peer(engine_id)

    def share_prefix(self, command: ShareCommand, received_at: float) -> None:
        """Send a cached prefix to another node."""
        self.prefixes.share_prefix(command, received_at)

    def abort(self, abort: AbortAll) -> None:
        """Stop sending the prefixes that an abort message concerns."""
        self.prefixes.abort(abort)

    def step(self, outbox: Outbox) -> None:
        """Continue all transfers; report peers that have connected or failed."""
        if self.arrivals is not None:
            for event in self.arrivals.step():
                outbox.report_peer(event, is_encode_node=True)
        self.prefixes.step(outbox)

    # ------------------------------------------------------------------ what operators see

    @property
    def num_transfers(self) -> int:
        """Number of encodings and prefixes that are expected, sent, or in quarantine."""
        return self._num_encodings + self.prefixes.num_transfers

    @property
    def _num_encodings(self) -> int:
        return 0 if self.arrivals is None else self.arrivals.incoming.num_transfers

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of blocks that senders of lost prefixes may still write."""
        return self.prefixes.num_quarantined_blocks

    @property
    def num_waiting_for_encodings(self) -> int:
        """Number of prompts that wait for encodings."""
        return 0 if self.arrivals is None else self.arrivals.num_waiting

    def held(self) -> list[BlockHolding]:
        """Return the blocks of fetched and sent prefixes, for the ledger."""
        return self.prefixes.held()

    def encodings_ledger(self) -> Ledger | None:
        """Return the owners of the memory for encodings; None: this node receives none."""
        return None if self.arrivals is None else self.arrivals.ledger()

    def add_metrics(self, metrics: HandoffMetrics) -> HandoffMetrics:
        """Return metrics of hand-offs with counts of encodings and prefixes; thread-safe."""
        if self.arrivals is not None:
            metrics = dataclasses.replace(
                metrics,
                encodings_open=self._num_encodings,
                encodings_lost=self.arrivals.num_lost_total,
            )
        return self.prefixes.add_metrics(metrics)
