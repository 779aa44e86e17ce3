"""Prefixes: the cached prefixes that one node receives from other nodes or sends to them.

    command -> the prompt waits -> received or lost -> this node computes what is missing

Refuses to know: roles, steps, encodings.
"""

from __future__ import annotations

import dataclasses

from baton.kv.prefixes import is_fetch_end, is_prefix_end, share_end
from baton.link.words import AbortAll, RequestCommand, ShareCommand
from baton.telemetry.ledger import BlockHolding
from engine.core.request import Request
from kvconnector.base import HandoffMetrics
from kvconnector.peer_info import PeerInfo
from node_runtime.inbox import Outbox, SideWork
from node_runtime.prefixes.fetches import Fetches
from node_runtime.prefixes.prefix_wait import PrefixWait
from node_runtime.prefixes.shares import Shares


class Prefixes(SideWork):
    """The cached prefixes that one node receives and sends. Used on the node's thread.

    Args:
        fetches: receives prefixes; None: this node receives none.
        shares: sends prefixes; None: this node sends none.
    """

    def __init__(self, fetches: Fetches | None = None, shares: Shares | None = None) -> None:
        self.fetches, self.shares = fetches, shares

    # ------------------------------------------------------------------ prompts

    def expect_prefix(
        self, request: Request, command: RequestCommand, received_at: float
    ) -> PrefixWait | None:
        """Let a new request wait for a cached prefix; return None if no node sends one."""
        if self.fetches is None:
            return None
        return self.fetches.expect(request, command, received_at)

    def cancel(self, request_id: str, epoch: int) -> None:
        """Stop waiting for a prefix for a request that has ended."""
        if self.fetches is not None:
            self.fetches.cancel(request_id, epoch)

    # ------------------------------------------------------------------ peers

    def add_peer(self, peer: PeerInfo) -> bool:
        """Connect another node's end for prefixes; return False for any other kind of peer."""
        if not is_prefix_end(peer.engine_id):
            return False
        if is_fetch_end(peer.engine_id):
            if self.shares is not None:
                self.shares.add_peer(peer)
        elif self.fetches is not None:
            self.fetches.incoming.add_peer(peer)
        return True

    def lose_peer(self, engine_id: str) -> None:
        """End the transfers of prefixes from and to a departed node."""
        if self.fetches is not None:
            self.fetches.incoming.lose_peer(share_end(engine_id))
        if self.shares is not None:
            self.shares.lose_peer(engine_id)

    def share_prefix(self, command: ShareCommand, received_at: float) -> None:
        """Send a cached prefix to another node."""
        if self.shares is None:
            super().share_prefix(command, received_at)
        else:
            self.shares.share_prefix(command, received_at)

    def abort(self, abort: AbortAll) -> None:
        """Stop sending the prefixes that an abort message concerns."""
        if self.shares is not None:
            self.shares.abort(abort)

    def step(self, outbox: Outbox) -> None:
        """Continue all transfers; report peers that have connected or failed."""
        if self.fetches is not None:
            for event in self.fetches.incoming.step():
                outbox.report_peer(event)
        if self.shares is not None:
            self.shares.step(outbox)

    # ------------------------------------------------------------------ what operators see

    @property
    def num_transfers(self) -> int:
        """Number of prefixes that are expected, being sent, or in quarantine."""
        fetched = 0 if self.fetches is None else self.fetches.incoming.num_transfers
        return fetched + (0 if self.shares is None else self.shares.num_transfers)

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of blocks that senders of lost prefixes may still write."""
        return 0 if self.fetches is None else self.fetches.incoming.quarantine.num_blocks

    def held(self) -> list[BlockHolding]:
        """Return the blocks of fetched and sent prefixes, for the ledger."""
        fetched = [] if self.fetches is None else self.fetches.incoming.held()
        return fetched + ([] if self.shares is None else self.shares.held())

    def add_metrics(self, metrics: HandoffMetrics) -> HandoffMetrics:
        """Return a copy of metrics with the counts of prefixes added; thread-safe."""
        if self.shares is not None:
            metrics = self.shares.add_metrics(metrics)
        if self.fetches is None:
            return metrics
        counts = self.fetches.counts
        return dataclasses.replace(
            metrics,
            num_quarantined_blocks=metrics.num_quarantined_blocks + self.num_quarantined_blocks,
            fetches=counts.by_state(),
            fetches_open=self.num_transfers,
            fetched_tokens=counts.tokens,
            fetched_bytes=counts.num_bytes,
            fetched_ages=counts.ages.copy(),
        )
