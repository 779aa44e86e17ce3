"""Router, two prefill and two decode nodes, and their clients: all real but for threads, time and
network, which move by hand. Knows what must be true of them, and not what happens to them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from baton.kv.block_hash import shorten
from baton.kv.prefixes import node_of
from baton.link.words import (
    BEAT_INTERVAL_S,
    DrainCommand,
    NodeRegistration,
    NodeRole,
    split_request_id,
)
from decode_node.node import DecodeNode
from engine.make_engine import make_engine
from kvconnector.base import TransferEventKind
from kvconnector.ends import Receiver
from kvconnector.protocol.messages import Message
from kvconnector.protocol.seals import peek
from prefill_node.node import PrefillNode
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.calls.recovery.recovery import Recoveries
from router.calls.recovery.retry_budget import RetryBudget, RetryOptions
from router.calls.wake_ups import WakeUps
from router.fleet.node_pool import NodePool
from router.fleet.prefix.prefix_index import PrefixIndex
from router.policies import POLICIES
from tests.fakes.engine.cache_contents import check_cache
from tests.fakes.engine.dead_engines import let_die
from tests.fakes.engine.drafting_executor import DraftingExecutor
from tests.fakes.handoff.fetch_cluster import check_side_blocks, open_prefixes
from tests.fakes.handoff.handoff_cluster import (
    BLOCK_SIZE,
    CheckedEngine,
    is_beat,
    make_decode_node,
    make_prefill_node,
    sender_of,
)
from tests.fakes.handoff.scripted_network import ScriptedMessage, ScriptedNetwork
from tests.fakes.router.eager_sources import EagerSources
from tests.fakes.router.sometimes_alone import SometimesAlone
from tests.fakes.system.checked_client import Client
from tests.fakes.system.node_process import NodeProcess
from tests.fakes.system.system_setup import Setup
from tests.fakes.system.written_blocks import check_writes
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop

NAMES = ("p0", "p1", "d0", "d1")
IDENTITY = {"model": "digest"}
ROUND_S = 0.05  # of virtual time, in `flow`
IDLE_ROUND_S = 0.2  # in `settle`, when nothing happens
QUIET_S = 2.5  # longer than any beat, lease, back-off or repeated message
FETCH_TIMEOUT_S = 2.0
SETTLE_S = 90.0  # no call may need longer once nothing goes wrong any more
TERMINAL = (TransferEventKind.COMMITTED, TransferEventKind.FAILED)


class System:
    """All processes, in the order of `NAMES`, and the network between them.

    Attributes:
        processes: the last start of each node, by name.
        by_id: every start of each node.
        dead: engine ids of processes that ended.
        cut: names of nodes whose KV messages are lost.
        loses: kinds of message of which the next one is lost.
        max_model_len: longest sequence of every node, in tokens.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = VirtualClock()
        self.loop = VirtualLoop(self.clock)
        self.network = ScriptedNetwork()
        self._num_routers = 0
        self._outputs: dict[str, tuple[int, ...]] = {}  # right ones, by the calls' request ids
        self._start_router()
        self.processes: dict[str, NodeProcess] = {}
        self.by_id: dict[str, NodeProcess] = {}
        self.dead: set[str] = set()
        self.cut: set[str] = set()
        self.loses: set[type[Message]] = set()
        self.clients: list[Client] = []
        self._watch = self.loop.create_task(self._count_missed_beats())
        for name in NAMES:
            self.start(name)
        self.settle()
        assert num_pairs(self.pool) == 4
        self.max_model_len = self.pool.max_model_len

    async def _count_missed_beats(self) -> None:  # as `router/program.py` does
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            self.pool.count_missed_beats()

    # ------------------------------------------------------------------ processes

    def _start_router(self) -> None:
        setup = self.setup
        self._num_routers += 1
        self.pool = NodePool(
            own_identity=IDENTITY,
            max_model_len=1000,
            may_self_prefill=setup.sometimes_alone,
            clock=self.clock,
        )
        self.pool.router_id = f"router{self._num_routers}"
        if setup.fetches:
            self.pool.prefix_sources = EagerSources(self.clock)
        if setup.index_is_small:
            self.pool.prefix_index = PrefixIndex(max_blocks=5, sweep_blocks=2, clock=self.clock)
        policy = POLICIES.load(setup.policy)()
        if setup.sometimes_alone:
            policy = SometimesAlone(policy)
        recoveries = Recoveries(
            self.pool, RetryOptions(return_timeout_s=5.0), RetryBudget(clock=self.clock)
        )
        self.dispatcher = Dispatcher(self.pool, policy, recoveries)
        self.dispatcher.epochs = itertools.count(1_000_000 * self._num_routers)
        busy_share = 1.0 if setup.router_is_busy else 0.0
        self.dispatcher.wake_ups = WakeUps(
            clock=self.clock,
            cpu_clock=lambda: busy_share * self.clock(),
            wait_clock=float,
        )

    def restart_router(self, *, quietly: bool) -> None:
        """End the router and its clients' calls, and start another router in its place."""
        self._start_router()
        for process in self.by_id.values():
            process.lose_router(self.pool, quietly=quietly)
        for client in self.clients:
            if not client.is_done:
                self.leave(client)
        self.loop.run_until_idle()

    def drain(self, name: str, *, resume: bool) -> None:
        """Drain or resume a node, as an operator does through the router; lost without a link."""
        node = self.pool.node(self.processes[name].engine_id)
        if node is not None:
            node.send(DrainCommand(resume=resume))

    def start(self, name: str) -> None:
        """Start a node; if it replaces an earlier one, it is another peer."""
        setup = self.setup
        is_prefill = name.startswith("p")
        node: PrefillNode | DecodeNode
        process = NodeProcess(name, self.clock, self.loop, self.pool)
        engine_id = f"{name}-{len(self.by_id)}"
        options: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "num_blocks": setup.num_blocks * setup.num_groups,
            "max_num_requests": 4,
            "max_num_batched_tokens": 12,
            "long_prefill_token_threshold": 5,
            "async_scheduling": setup.async_scheduling,
            "preemption": "recompute" if is_prefill else setup.preemption,
        }
        config = EngineConfig(**(options | dict(setup.engine_options)))
        where = (self.network, process.emit, self.clock)
        digests = setup.kv_digests
        if is_prefill:
            engine = make_engine(setup.folder, config, IDENTITY)
            prefill = make_prefill_node(
                engine_id, engine, *where, setup.push_mode, kv_digests=digests
            )
            node, peer_info = prefill, prefill.sender.describe()
        else:
            engine = CheckedEngine(setup.folder, config, setup.expected_kv, IDENTITY)
            decode = make_decode_node(engine_id, engine, *where, setup.options, kv_digests=digests)
            node, peer_info = decode, decode.receiver.describe()
        ends = self._open_prefix_ends(process, node, engine_id) if setup.fetches else {}
        if setup.num_drafts:
            engine.executor = DraftingExecutor(
                engine.executor, self._output_of, setup.num_drafts, wrong_every=3
            )
        registration = NodeRegistration(
            node_name=name,
            engine_id=engine_id,
            role=NodeRole.PREFILL if is_prefill else NodeRole.DECODE,
            version="1",
            address="",
            peer_info=peer_info,
            compatibility=dict(engine.compatibility),
            max_model_len=engine.max_model_len,
            num_blocks=engine.num_blocks,
            block_size=BLOCK_SIZE,
            prefix_hash=config.prefix_hash,
            computes_prompts=setup.sometimes_alone and not is_prefill,
            encodes_images=engine.features.images.are_taken,
            **ends,
        )
        process.begin(node, registration, chunk_s=setup.chunk_s if is_prefill else 0.0)
        self.processes[name] = self.by_id[engine_id] = process

    def _open_prefix_ends(
        self, process: NodeProcess, node: PrefillNode | DecodeNode, engine_id: str
    ) -> dict[str, Any]:
        """Let a node exchange cached prefixes; return its peer infos for the registration."""
        prefixes, receiver, sender = open_prefixes(
            *(engine_id, node.engine, self.network, self.clock, FETCH_TIMEOUT_S),
            kv_digests=self.setup.kv_digests,
        )
        if isinstance(node, PrefillNode):
            node.side_work.prefixes = prefixes
        else:
            node.side_work = prefixes
        process.prefix_ends = (receiver, sender)
        return {"fetch_peer_info": receiver.describe(), "share_peer_info": sender.describe()}

    def kill(self, name: str, *, quietly: bool) -> None:
        process = self.processes[name]
        self.dead.add(process.engine_id)
        self.network.kill(process.engine_id)
        for end in process.prefix_ends:
            self.network.kill(end.peer_info.engine_id)
        let_die(process.node.engine)
        process.end(quietly=quietly)

    def talk(self, name: str, num_up: int, num_down: int) -> None:
        """See `NodeProcess.talk`; the router may still hear of earlier starts."""
        for process in list(self.by_id.values()):
            if process.name == name:
                process.talk(num_up, num_down)

    # ------------------------------------------------------------------ clients

    def call(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        timeout_s: float,
        expected: tuple[tuple[int, ...], FinishReason],
        cache_salt: bytes = b"",
        priority: int = 0,
    ) -> Client:
        """Begin a call."""
        call = Call(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            terms=Terms(received_at=time.perf_counter(), priority=priority),
            timeout_s=timeout_s,
            cache_salt=cache_salt,
        )
        self._outputs[request_id] = expected[0]
        client = Client(call, expected)
        client.may_read.set()
        client.task = self.loop.create_task(client.read(self.dispatcher))
        self.clients.append(client)
        return client

    def _output_of(self, request_id: str) -> tuple[int, ...]:
        """Return the tokens that a call's client must get, by the call's id on a node."""
        return self._outputs[split_request_id(request_id)[0]]

    def leave(self, client: Client) -> None:
        """Disconnect a client."""
        assert client.task is not None
        client.left = True
        client.task.cancel()

    def states_of(self, client: Client) -> dict[str, str]:
        """Return the states of a call's hand-off on the nodes that have it open, by node name."""
        request_id = client.call.request_id
        return {
            name: view.transfer_state
            for name, process in self.processes.items()
            for view in ([] if process.dead else process.node.requests())
            if split_request_id(view.request_id)[0] == request_id
        }

    # ------------------------------------------------------------------ time

    def deliver_all(self) -> None:
        """Deliver all messages under way, in order, except lost ones."""
        for _ in range(len(self.network.messages)):
            if self._is_lost(self.network.messages[0]):
                self.network.drop(0)
            else:
                self.network.deliver(0)

    def _is_lost(self, message: ScriptedMessage) -> bool:
        content = peek(message.payload)
        if type(content) in self.loses:
            self.loses.remove(type(content))
            return True
        ends = (message.target, content.engine_id)
        return any(self.by_id[node_of(end)].name in self.cut for end in ends)

    def turn(self) -> None:
        """Run a little of everything except the network between the nodes."""
        for process in list(self.by_id.values()):
            process.talk(20, 20)
            process.round()
            process.step()
        self.loop.run_until_idle()

    def flow(self, seconds: float = ROUND_S, *, lands: bool = True) -> None:
        """Run a little of everything, without faults.

        Args:
            lands: whether writes land at once; otherwise they take longer.
        """
        self.turn()
        self._carry(lands=lands)
        for _ in range(self.setup.rounds_per_step - 1):
            for process in self.by_id.values():
                process.round()
            self._carry(lands=lands)
        self.clock.advance(seconds)

    def _carry(self, *, lands: bool) -> None:
        self.deliver_all()
        while self.network.writes and lands:
            self.network.land(0)

    def heal(self, *, restart: bool) -> None:
        """Stop all faults from now on."""
        self.cut.clear()
        self.loses.clear()
        for process in list(self.processes.values()):
            process.stopped = process.muted = False
            process.resume()
            if process.dead and restart:
                self.start(process.name)
        for client in self.clients:
            client.may_read.set()

    def settle(self) -> None:
        """Run everything without faults until only heartbeats happen for a while.

        All that live must be together by then, and no block kept from a peer that is gone.
        """
        quiet_since, last = self.clock(), -1
        give_up_at = quiet_since + SETTLE_S
        while (now := self.clock()) - quiet_since < QUIET_S:
            assert now < give_up_at, f"it never becomes quiet: {self._what_is_open()}"
            busy = bool(self.network.writes) or not all(map(is_beat, self.network.messages))
            self.flow(IDLE_ROUND_S if now - quiet_since > ROUND_S else ROUND_S)
            busy |= self.num_steps != last or not all(client.is_done for client in self.clients)
            last = self.num_steps
            if busy or not self._is_whole:
                quiet_since = self.clock()

    @property
    def _is_whole(self) -> bool:
        """Return whether all living processes reach each other and hold nothing for dead ones."""
        alive = [process for process in self.processes.values() if not process.dead]
        num_prefills = sum(isinstance(process.node, PrefillNode) for process in alive)
        if num_pairs(self.pool) != num_prefills * (len(alive) - num_prefills):
            return False
        if any(self.pool.node(process.engine_id) is None for process in alive):
            return False
        reach = self.pool.prefix_sources._reach.bandwidths
        num_connected = sum(len(reached) for reached in reach.values())
        if self.setup.fetches and num_connected != len(alive) * (len(alive) - 1):
            return False
        return all(process.node.beat().num_quarantined_blocks == 0 for process in alive)

    def _what_is_open(self) -> str:
        calls = [client.call.request_id for client in self.clients if not client.is_done]
        nodes = {
            process.engine_id: f"{process.node.beat()}, link {process.link is not None}"
            for process in self.processes.values()
            if not process.dead
        }
        return f"calls {calls}, {num_pairs(self.pool)} pairs, {nodes}"

    @property
    def num_steps(self) -> int:
        """Number of steps of all nodes that computed something."""
        return sum(process.node.engine.num_steps for process in self.by_id.values())

    def close(self) -> None:
        """End the router, and check that calls that are over left nothing behind."""
        self._watch.cancel()
        self.loop.run_until_idle()
        assert asyncio.all_tasks(self.loop) == set()
        assert self.loop.errors == []

    def abandon(self) -> None:
        """End what a failed test left behind; harmless after `close`."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_idle()
        self.loop.close()

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Assert what must hold at any time (architecture, 4.3)."""
        for client in self.clients:
            client.check()
        for process in self.by_id.values():
            if not process.dead:
                process.node.engine.check()
                ledger = process.node.ledger()
                assert (ledger.orphans, ledger.overdrawn) == ((), ())
                check_side_blocks(process.node)
                check_cache(process.node.engine, self.setup.contents)
        self.check_writes()

    def check_writes(self) -> None:
        """Check that blocks a peer may write are held, name no content, and are offered once."""
        check_writes(self.by_id, self.network)

    def check_clean(self) -> None:
        """Check, after all is quiet, that living processes hold nothing and have nothing open."""
        assert all(client.is_done for client in self.clients), "a call hangs"
        assert self.dispatcher.num_open == 0
        for node in self.pool.nodes:
            assert node.legs == {}
            assert node.load.num_open_tokens == 0
        for process in self.by_id.values():
            if process.dead:
                continue
            engine = process.node.engine
            assert engine.requests == {}
            assert process.node.requests() == []
            held = engine.block_pool.ref_counts()
            assert len(held) == engine.kv_memory.spec.num_null_blocks, held
            if isinstance(process.node, PrefillNode):
                sender = sender_of(process.node)
                assert sender.machine.transfers == {}
                assert len(sender.machine.repeats) == 0
                emitted = sender.heard
                ends = Counter((e.request_id, e.epoch) for e in emitted if e.kind in TERMINAL)
                assert ends == Counter(sender.started)  # one end per transfer
            else:
                assert not process.node.reservations.has_open
                assert isinstance(process.node.receiver, Receiver)
                _check_receiver(process.node.receiver)
            if process.prefix_ends:
                receiver, prefix_sender = process.prefix_ends
                assert process.node.side_work.num_transfers == 0
                assert process.node.engine.features.side_blocks.num_held == 0
                assert prefix_sender.machine.transfers == {}
                _check_receiver(receiver)
            self._check_index(process)

    def _check_index(self, process: NodeProcess) -> None:
        """Check that the router's index equals each node's prefix cache, if the node told it."""
        index, engine = self.pool.prefix_index, process.node.engine
        index.check()
        if process.is_misheard:
            return
        assert engine.block_pool.take_events() == []
        names = set(shorten(engine.block_pool.start_events()))
        holder = index._holders[process.engine_id]
        assert holder.blocks <= names
        assert len(holder.blocks) + holder.num_left_out == len(names)
        assert index.is_exact(process.engine_id) == (holder.num_left_out == 0)


def _check_receiver(receiver: Receiver) -> None:
    assert len(receiver.machine.grants) == 0
    assert receiver.verifier is None or len(receiver.verifier) == 0


def num_pairs(pool: NodePool) -> int:
    """Return the number of pairs of nodes that may get requests."""
    fleet = pool.fleet
    return sum(len(fleet.reached_by(prefill)) for prefill in fleet.prefills)
