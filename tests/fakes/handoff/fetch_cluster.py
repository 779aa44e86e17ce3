"""A `Cluster` whose prefill node gets cached prefixes from its decode node."""

from __future__ import annotations

import dataclasses
from typing import Any

from baton.api.sampling_params import SamplingParams
from baton.kv.prefixes import fetch_end, share_end
from baton.link.words import AbortAll, CancelCommand, PeerUpdate, PrefillCommand, ShareCommand
from baton.telemetry.ledger import BlockOwner
from kvconnector.block_digests import BlockDigests
from kvconnector.ends import Receiver, Sender
from node_runtime.prefixes.fetches import Fetches
from node_runtime.prefixes.shares import Shares
from tests.fakes.handoff.handoff_cluster import Cluster, Key
from tests.fakes.handoff.scripted_network import ScriptedTransport

TIMEOUT_S = 5.0
END_NAMES = {"p": fetch_end("p"), "d": share_end("d")}


class FetchCluster(Cluster):
    """A prefill node with `Fetches` and a decode node with `Shares`; see `Cluster` for the rest."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.ends: dict[str, Receiver | Sender] = {}
        super().__init__(*arguments, **options)
        p, d = self.p.engine, self.d.engine
        receiver = self._end(Receiver, "p", p)
        self.fetches = self.p.side_work.fetches = Fetches(p, receiver, TIMEOUT_S, self.clock)
        self.shares = self.d.side_work = Shares(d, self._end(Sender, "d", d), self.clock)
        self.rejoin_ends()
        self.settle()

    def _end(self, kind: type[Any], engine_id: str, engine: Any) -> Any:
        memory = engine.kv_memory
        transport = ScriptedTransport(END_NAMES[engine_id], memory, self.network)
        digests = BlockDigests(memory) if self._kv_digests else None
        end = kind(transport, lambda: None, _never, self.clock, digests)
        transport.channels = end.loop.channels
        self.ends[engine_id] = end
        return end

    def rejoin_ends(self) -> None:
        """Introduce the nodes and their ends for prefixes."""
        told = {engine_id: end.describe() for engine_id, end in self.ends.items()}
        self.p.submit(PeerUpdate("d", self.receiver.describe(), share_peer_info=told["d"]))
        self.d.submit(PeerUpdate("p", self.sender.describe(), fetch_peer_info=told["p"]))

    def ask(
        self, key: Key, prompt: list[int], max_tokens: int, num_fetched: int, *, shares: bool = True
    ) -> None:
        """Place a request whose prefill node is to get a prefix from the decode node.

        Args:
            num_fetched: tokens of the prefix that the router thinks the decode node has.
            shares: whether the decode node is told to send the prefix.
        """
        self.place(*key, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, seed=0))
        at, command = self.p._inbox._commands.pop()
        assert isinstance(command, PrefillCommand)
        told = dataclasses.replace(command, fetch_engine_id="d", fetch_num_tokens=num_fetched)
        self.p._inbox._commands.append((at, told))
        if shares:
            self.share(key, prompt[:num_fetched])

    def share(self, key: Key, prefix: list[int]) -> None:
        """Tell the decode node to send a prefix."""
        self.d.submit(
            ShareCommand(
                request_id=key[0],
                epoch=key[1],
                prefill_engine_id="p",
                timeout_s=60.0,
                prompt_token_ids=prefix,
            )
        )

    def round(self, engine_id: str) -> None:
        super().round(engine_id)
        if engine_id in self.ends and engine_id not in self.dead | self.stopped:
            self.ends[engine_id].loop.round()

    def kill(self, engine_id: str, *, told: bool = True) -> None:
        super().kill(engine_id, told=told)
        self.network.kill(END_NAMES[engine_id])

    def run(self, seconds: float) -> None:
        """Let time pass; all messages arrive, and all writes land."""
        until = self.clock() + seconds
        while self.clock() < until:
            for engine_id in "dp":
                self.round(engine_id)
                self.step(engine_id)
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


def _never(error: Exception) -> None:
    raise AssertionError("no thread runs that could die") from error
