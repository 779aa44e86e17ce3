"""A `Cluster` whose two nodes fetch cached prefixes from each other."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from baton.api.sampling_params import SamplingParams
from baton.kv.prefixes import fetch_end, node_of, share_end
from baton.link.words import (
    AbortAll,
    CancelCommand,
    DecodeCommand,
    PeerUpdate,
    PrefillCommand,
    ShareCommand,
)
from baton.telemetry.ledger import BlockOwner
from decode_node.node import DecodeNode
from engine.engine import Engine
from kvconnector.block_digests import BlockDigests
from kvconnector.ends import Receiver, Sender
from node_runtime.prefixes.fetches import Fetches
from node_runtime.prefixes.prefixes import Prefixes
from node_runtime.prefixes.shares import Shares
from prefill_node.node import PrefillNode
from tests.fakes.handoff.handoff_cluster import Cluster, Key
from tests.fakes.handoff.scripted_network import ScriptedNetwork, ScriptedTransport
from tests.fakes.time.virtual_clock import VirtualClock

TIMEOUT_S = 5.0


def open_prefixes(
    engine_id: str,
    engine: Engine,
    network: ScriptedNetwork,
    clock: VirtualClock,
    timeout_s: float,
    *,
    kv_digests: bool,
) -> tuple[Prefixes, Receiver, Sender]:
    """Open both ends for prefixes of a node without threads."""

    def open_end(kind: type[Any], end_id: str) -> Any:
        memory = engine.kv_memory
        transport = ScriptedTransport(end_id, memory, network)
        digests = BlockDigests(memory) if kv_digests else None
        end = kind(transport, lambda: None, _never, clock, digests)
        transport.channels = end.loop.channels
        return end

    receiver = open_end(Receiver, fetch_end(engine_id))
    sender = open_end(Sender, share_end(engine_id))
    fetches = Fetches(engine, receiver, timeout_s, clock)
    return Prefixes(fetches, Shares(engine, sender, clock)), receiver, sender


class FetchCluster(Cluster):
    """Two nodes that each have both ends for prefixes; see `Cluster` for all else.

    Attributes:
        fetches, d_fetches: prefixes that the prefill node and the decode node receive.
        shares, p_shares: prefixes that the decode node and the prefill node send.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.ends: dict[str, Receiver | Sender] = {}  # by their engine ids
        super().__init__(*arguments, **options)
        self.fetches, self.p_shares = self._open_both("p", self.p.engine)
        self.d_fetches, self.shares = self._open_both("d", self.d.engine)
        self.p.side_work.prefixes = Prefixes(self.fetches, self.p_shares)
        self.d.side_work = Prefixes(self.d_fetches, self.shares)
        self.rejoin_ends()
        self.settle()

    def _open_both(self, engine_id: str, engine: Engine) -> tuple[Fetches, Shares]:
        prefixes, receiver, sender = open_prefixes(
            *(engine_id, engine, self.network, self.clock, TIMEOUT_S), kv_digests=self._kv_digests
        )
        self.ends |= {fetch_end(engine_id): receiver, share_end(engine_id): sender}
        assert prefixes.fetches is not None
        assert prefixes.shares is not None
        return prefixes.fetches, prefixes.shares

    def rejoin_ends(self) -> None:
        """Introduce the nodes and their ends for prefixes."""

        def told(engine_id: str, hand_off: bytes) -> PeerUpdate:
            ends = (self.ends[name(engine_id)].describe() for name in (fetch_end, share_end))
            return PeerUpdate(engine_id, hand_off, False, *ends)

        self.p.submit(told("d", self.receiver.describe()))
        self.d.submit(told("p", self.sender.describe()))

    def ask(
        self,
        key: Key,
        prompt: list[int],
        max_tokens: int,
        num_fetched: int,
        *,
        shares: bool = True,
        alone: bool = False,
    ) -> None:
        """Place a request whose prefill node fetches a prefix from the decode node.

        Args:
            num_fetched: number of the prefix's tokens that the holder has, as far as the router
                knows.
            shares: whether the holder is told to send the prefix.
            alone: whether the decode node computes the prompt itself, with a prefix from the
                prefill node.
        """
        params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0)
        self.place(*key, prompt, params, alone=alone)
        inbox, holder = (self.d if alone else self.p)._inbox, "p" if alone else "d"
        at, command = inbox._commands.pop()
        assert isinstance(command, PrefillCommand | DecodeCommand)
        told = dataclasses.replace(command, fetch_engine_id=holder, fetch_num_tokens=num_fetched)
        inbox._commands.append((at, told))
        if shares:
            self.share(key, prompt[:num_fetched], holder)

    def share(self, key: Key, prefix: list[int], holder: str = "d") -> None:
        """Tell a node to send a prefix to the other node."""
        (self.d if holder == "d" else self.p).submit(
            ShareCommand(
                request_id=key[0],
                epoch=key[1],
                reader_engine_id="p" if holder == "d" else "d",
                timeout_s=60.0,
                prompt_token_ids=prefix,
            )
        )

    def round(self, engine_id: str) -> None:
        super().round(engine_id)
        if engine_id not in self.dead | self.stopped:
            for end_id, end in self.ends.items():
                if node_of(end_id) == engine_id:
                    end.loop.round()

    def kill(self, engine_id: str, *, told: bool = True) -> None:
        super().kill(engine_id, told=told)
        for name in (fetch_end, share_end):
            self.network.kill(name(engine_id))

    def run(self, seconds: float) -> None:
        """Let time pass; all messages arrive, and all writes land."""
        until = self.clock() + seconds
        while self.clock() < until:
            for engine_id in "dp":
                self.round(engine_id)
                self.step(engine_id)
                if engine_id not in self.dead:
                    check_side_blocks(self.p if engine_id == "p" else self.d)
            while self.network.messages:
                self.network.deliver(0)
            while self.network.writes:
                self.network.land(0)
            self.clock.advance(0.05)

    def output(self, key: Key) -> list[int]:
        """Return the tokens of a request that has ended."""
        attempt = self.attempts[key]
        assert attempt.is_complete, attempt.error or "it has not ended"
        return [attempt.tokens[index] for index in range(len(attempt.tokens))]

    def abort(self, router_id: str) -> None:
        """Tell both nodes that the link to a router broke."""
        for node in (self.p, self.d):
            node.submit(AbortAll("the link broke", router_id))

    def end(self, key: Key) -> None:
        """Cancel a request on both nodes."""
        for node in (self.p, self.d):
            node.submit(CancelCommand(*key))
        self.attempts[key].is_open = False

    def assert_at_rest(self) -> None:
        """Assert that no block but the null block has a reference, and no transfer is open."""
        for engine_id, node in (("p", self.p), ("d", self.d)):
            if engine_id not in self.dead:
                ledger = node.ledger()
                assert (ledger.orphans, ledger.overdrawn) == ((), ())
                owners = {holding.owner for holding in ledger.holdings}
                assert owners <= {BlockOwner.NULL_BLOCK}, ledger.holdings
                assert node.beat().num_transfers == 0
                node.engine.check()


def check_side_blocks(node: PrefillNode | DecodeNode) -> None:
    """Check that a node counts all blocks that transfers withhold, as its ledger lists them."""
    features, pool = node.engine.features, node.engine.block_pool
    holdings = [*node.side_work.held(), *features.held_by_files()]
    listed = Counter(block_id for one in holdings for block_id in one.block_ids)
    assert features.side_blocks.num_held == pool.num_free_among(listed, listed)


def _never(error: Exception) -> None:
    raise AssertionError("no thread runs that could die") from error
