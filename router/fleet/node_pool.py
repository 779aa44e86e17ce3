"""NodePool: the joined nodes, which of them are connected, and the attempts open on each.

The pool gets registrations, reports and deltas from links, and makes the fleet from which policies
pick nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec

from baton.adapters.digest import shorten_digest
from baton.api.images import PromptImage
from baton.api.printable import printable
from baton.checkpoint.model_identity import Identity, identity_of
from baton.kv.block_hash import HASH_ALGORITHMS, cache_namespace
from baton.kv.prefixes import is_prefix_end, node_of
from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.link.words import (
    PAIR_ROLES,
    AdminReply,
    DrainCommand,
    DrainSeen,
    KVCacheEvents,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    PeerReport,
    PeerReports,
    SendKVSnapshot,
    StepDeltas,
    protocol_problem,
)
from router.fleet.adapter_places import AdapterPlaces
from router.fleet.encodings.encode_places import EncodePlaces
from router.fleet.encodings.encode_work import EncodeWork
from router.fleet.fleet import Fleet
from router.fleet.fleet_choice import make_fleet, make_prompt_fleet
from router.fleet.health import NodeHealth
from router.fleet.join_gate import JoinGate
from router.fleet.load.beat_watch import BeatWatch
from router.fleet.load.forecast import PlaceForecasts
from router.fleet.load.node_load import NodeLoad, SharedRates
from router.fleet.lost_nodes import LostNodes, no_such_node
from router.fleet.node import Node
from router.fleet.node_claims import Vocabulary, event_problem, registration_problem
from router.fleet.peers.introductions import Introductions
from router.fleet.peers.pairing import Reach, are_peers, num_pairs_lost, receives_from, why_no_pair
from router.fleet.prefix.prefix_index import PrefixIndex
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes
from router.fleet.prefix.session_places import SessionPlaces
from router.fleet.prefix_sources import PrefixSource, PrefixSources
from router.fleet.rollout import Rollout
from router.fleet.served_identity import ServedIdentity

logger = logging.getLogger(__name__)

# Maximum number of characters kept of a problem that a node reports about a peer
MAX_KEPT_CHARS = 1024
# Nodes hang up on a silent router after 1.5 s or more. If this router was busy for longer than
# `HELD_UP_S`, nodes that hang up within the next `HELD_UP_FOR_S` do not count as lost.
HELD_UP_S, HELD_UP_FOR_S = 3 * BEAT_INTERVAL_S, 1.0


class NodePool:
    """All nodes of one base model.

    Args:
        own_identity: entries of `model_identity` that follow from the router's own model folder.
            Nodes with another ``model`` are refused; nodes with other differences may join but
            get no requests.
        max_model_len: the model's maximum number of tokens per request; nodes may allow fewer.
        max_missed_beats: a node that misses more beats than this in a row is lost.
        eligibility: functions of a node; the node gets new requests only while all return True.
            Call `note_eligibility_change` when a result changes.
        may_self_prefill: whether decode nodes may compute prompts.
        engine_timeout_s: a node is stuck if one round of one of its threads lasts this many
            seconds, and much longer than any round before.
        vocab_size: size of the model's vocabulary; the link of a node that sends a larger token id
            is ended.
        clock: returns monotonic seconds.
        router_id: id of the router; None: a random one.
        gate: decides which nodes may join now, for all pools of a router; None: make a new gate.

    Attributes:
        router_id: distinguishes this router's requests from other routers'.
        prefix_index: which nodes have which parts of prompts in their prefix caches.
        session_places: which nodes may know which sessions.
        lost_nodes: the nodes that left unexpectedly.
        gate: decides which nodes may join now.
        identity: decides which identity of the nodes' models is served.
        rollout: decides which revisions of nodes get requests, and how many.
        vocabulary: limits of token ids and lengths in nodes' messages.
        adapters: which nodes have or can load which adapters.
        encode_places: which nodes encode which images.
        prefix_sources: which nodes send cached prefixes to which other nodes.
    """

    def __init__(
        self,
        *,
        own_identity: Mapping[str, str],
        max_model_len: int,
        max_missed_beats: int = 4,
        eligibility: Sequence[Callable[[Node], bool]] = (),
        may_self_prefill: bool = False,
        engine_timeout_s: float = 10.0,
        vocab_size: int = 2**32,
        clock: Callable[[], float] = time.monotonic,
        router_id: str | None = None,
        gate: JoinGate | None = None,
    ) -> None:
        self.router_id = router_id or secrets.token_hex(4)
        self.clock = clock
        self.gate = gate or JoinGate(clock)
        self.lost_nodes = LostNodes(clock)
        self.identity = ServedIdentity(own_identity, clock)
        self.rollout = Rollout(clock)
        self._own_model = own_identity["model"]
        self.vocabulary = Vocabulary(vocab_size, max_model_len)
        # Tokens of the longest request that the latest fleet can take; before the first fleet, the
        # model's limit.
        self._max_model_len = max_model_len
        self._nodes: dict[str, Node] = {}  # by engine id
        self._roles_seen: set[NodeRole] = set()
        self._has_had_encoders = self._has_had_alone = False
        self._eligibility = eligibility
        self._reach = Reach()
        self._introductions = Introductions(self._reach, clock)
        self._beats = BeatWatch(max_missed_beats, clock)
        self._rates = SharedRates()
        self._kv_sizes: Counter[float] = Counter()  # bytes of KV per token -> number of nodes
        self._may_self_prefill = may_self_prefill
        self._engine_timeout_s = engine_timeout_s
        self._counted_at: float | None = None  # time of the last count of missed beats
        self._num_news = 0  # reports on peers after which a new fleet is needed
        self._held_up_until = -math.inf
        self._fleet: Fleet | None = None  # None: make the fleet when it is read next
        # Fleet for pooled prompts; None: make it when it is read next
        self._prompt_fleet: Fleet | None = None
        # When the last missing node left; only roles without a usable node count. None: find out
        # at the next read.
        self._missing_since: float | None = None
        self._changed = asyncio.Event()
        self.prefix_index = PrefixIndex(clock=clock)
        self.session_places = SessionPlaces(self.prefix_index)
        self.adapters = AdapterPlaces(clock)
        self.encode_places = EncodePlaces(clock)
        self.prefix_sources = PrefixSources(clock)

    @property
    def nodes(self) -> list[Node]:
        return sorted(self._nodes.values(), key=lambda n: (n.registration.role.value, n.name))

    @property
    def members(self) -> Collection[Node]:
        """All nodes that have joined, in the order in which they joined."""
        return self._nodes.values()

    @property
    def num_nodes(self) -> int:
        """Number of nodes that have joined."""
        return len(self._nodes)

    @property
    def num_pair_nodes(self) -> int:
        """Number of prefill and decode nodes that have joined."""
        return sum(len(self._of(role)) for role in PAIR_ROLES)

    def can_load_adapter(self, digest: str) -> bool:
        """Return whether each role has a node that has an adapter in memory or can load it.

        A role without any joined node is ignored: requests wait for a node of this role anyway.
        """
        nodes = [n for n in self._nodes.values() if n.registration.role in PAIR_ROLES]
        takes = {n.registration.role for n in nodes if self.adapters.takes(n.load, digest)}
        return takes == {node.registration.role for node in nodes}

    @property
    def forecasts(self) -> PlaceForecasts:
        """Counts of how well the times of prompts were forecast, over all nodes."""
        return self._rates.forecasts

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request that some pair of nodes can take now.

        While no pair can be used, the last known value remains.
        """
        if self.fleet:
            self._max_model_len = min(self.fleet.max_model_len, self.vocabulary.max_model_len)
        return self._max_model_len

    @property
    def max_prompt_len(self) -> int:
        """Number of tokens that a pooled prompt must stay below.

        While no prefill node can be used, this is `max_model_len`.
        """
        fleet = self.prompt_fleet
        limit = self.vocabulary.max_model_len
        return min(fleet.max_model_len, limit) if fleet else self.max_model_len

    def plan_encodings(
        self,
        request_id: str,
        epoch: int,
        images: Sequence[PromptImage],
        prefill: Node | None,
        num_cached_tokens: int,
    ) -> EncodeWork:
        """Choose which encode nodes encode the images of an attempt, and count this work.

        Args:
            request_id: the call's id on nodes.
            epoch: number of the attempt.
            prefill: the attempt's prefill node; None: the decode node encodes all images.
            num_cached_tokens: number of prompt tokens that the prefill node probably has in its
                cache.
        """
        plan = None
        if images and prefill is not None and prefill.registration.encodings_peer_info:
            reached = self._reach.bandwidths
            nodes = [
                node
                for node in self._of(NodeRole.ENCODE)
                if prefill.engine_id in reached.get(node.engine_id, {})
                and receives_from(prefill, node)
                and not node.is_silent
                and self.is_eligible(node)
            ]
            plan = self.encode_places.plan(images, prefill, nodes, num_cached_tokens, epoch)
        return EncodeWork(request_id, images, plan, self.encode_places)

    def list_prefix_sources(
        self, reader: Node, hashes: PromptHashes, num_prompt_tokens: int
    ) -> list[PrefixSource]:
        """Return the sources of a cached prefix; the source that saves the most time comes first.

        Draining nodes are included, so that no other node must compute their sessions again.

        Args:
            reader: the node that is to compute the prompt.
            hashes: block hashes of the prompt.
        """
        if not reader.registration.fetch_peer_info:
            return []
        holders = [
            node
            for node in self._nodes.values()
            if node.registration.share_peer_info
            and not (node.is_silent or node.is_stuck)
            and self.identity.admits(node)
            # For other holders, the index expects this prompt itself, whose KV is not there yet.
            and self.prefix_index.is_exact(node.engine_id)
        ]
        cached = self.prefix_index.match_tokens(hashes)
        return self.prefix_sources.compare(reader, holders, cached, num_prompt_tokens)

    def find_cached_tokens(self, hashes: PromptHashes, role: NodeRole) -> Mapping[str, int]:
        """Return how many leading tokens of a prompt each node has in its cache, by engine id.

        Args:
            role: for nodes of this role, tokens that they can fetch count, too.
        """
        cached = self.prefix_index.match_tokens(hashes)
        if not self.prefix_sources or not cached:
            return cached
        readers = {node.engine_id: node for node in self._of(role)}
        return self.prefix_sources.add_fetchable(cached, readers)

    def max_len_at(self, nodes: Iterable[NodeLoad]) -> int:
        """Return the tokens of the longest request that all of these nodes can take."""
        return min(self.vocabulary.max_model_len, *(node.max_model_len for node in nodes))

    @property
    def lost(self) -> list[NodeRegistration]:
        """Nodes that left unexpectedly in the last minutes and did not come back."""
        return self.lost_nodes.missing

    @property
    def expects_pair(self) -> bool:
        """Return whether nodes that serve together were here before, or newcomers are expected."""
        were_here = self._roles_seen >= set(PAIR_ROLES)
        may_be_alone = self._may_self_prefill and self._has_had_alone
        return were_here or may_be_alone or self.lost_nodes.expects_newcomers

    @property
    def may_encode_images(self) -> bool:
        """Return whether the router accepts prompts with images.

        False if nodes have joined and none of them could encode images.
        """
        return self._has_had_encoders or self._roles_seen.isdisjoint(PAIR_ROLES)

    @property
    def expects_prefill(self) -> bool:
        """Return whether a prefill node has joined before, or newcomers are expected."""
        return NodeRole.PREFILL in self._roles_seen or self.lost_nodes.expects_newcomers

    def awaited_until(self, return_s: float) -> float:
        """Return until when the pool expects nodes of a role that lacks usable nodes.

        Returns -inf, or a time in the past, if no node is expected.

        Args:
            return_s: seconds that calls wait for a crashed node, or for a node that changes its
                weights.
        """
        lacking = [role for role in PAIR_ROLES if not any(map(self.is_eligible, self._of(role)))]
        if any(node.changes_weights for role in lacking for node in self._of(role)):
            return self.clock() + return_s
        if self._missing_since is None:
            since = map(self.lost_nodes.missing_since, lacking)
            self._missing_since = max(since, default=-math.inf)
        newcomers_until = self.lost_nodes.newcomers_until if lacking else -math.inf
        return max(self._missing_since + return_s, newcomers_until)

    def awaits_nodes(self, return_s: float) -> bool:
        """Return whether nodes that the pool lacks are expected to return; see `awaited_until`."""
        return self.awaited_until(return_s) > self.clock()

    async def wait_for_change(self) -> None:
        """Wait until a node joins, leaves, changes its state, or reports that a peer's changed."""
        await self._changed.wait()

    def node(self, engine_id: str) -> Node | None:
        return self._nodes.get(engine_id)

    def find_node(self, name: str) -> Node | None:
        """Return the node with this name or engine id; None: it is not here."""
        named = (one for one in self._nodes.values() if name in (one.name, one.engine_id))
        return next(named, None)

    async def find_or_await_node(self, name: str, return_s: float) -> Node | None:
        """Return the node with this name or engine id; None: it is not here.

        Waits for a node that was lost less than ``return_s`` seconds ago, or that may join because
        this router has just started. A node whose process still runs joins again at once.
        """
        while (node := self.find_node(name)) is None:
            rest_s = self.lost_nodes.expected_for(name, return_s)
            if not rest_s:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self.wait_for_change()
        return node

    # ------------------------------------------------------------------ membership

    @property
    def own_identity(self) -> Mapping[str, str]:
        """Entries of `model_identity` that follow from the router's own model folder."""
        return self.identity.own

    def find_pool(self, registration: NodeRegistration) -> NodePool:
        """Return this pool: if the router has one base model, all nodes join its pool."""
        return self

    def refusal(self, registration: NodeRegistration) -> str:
        """Return why this node can never join; empty if it can.

        `gate` decides whether the node may join now.
        """
        if not registration.node_name or not registration.engine_id:
            return "node_name and engine_id must not be empty"
        problem = protocol_problem(registration.protocol) or registration_problem(registration)
        if problem:
            return problem
        if self.gate.is_expelled(registration.engine_id):
            return f"{registration.node_name} was removed by an operator; start it anew"
        model = registration.compatibility.get("model")
        if model != self._own_model:
            return (
                f"model: {registration.node_name} has a model with configuration {model}, "
                f"this router serves {self._own_model}"
            )
        return ""

    def add_node(self, node: Node) -> None:
        """Add a node that the gate has let in, and introduce it to its peers.

        Removes the node's earlier link, if it is still listed: a node may notice a broken link
        before the router does.
        """
        for old in self.gate.namesakes(node):
            self.remove(old, "joined again")
            old.hang_up()
        node.share_compatibility(self._nodes.values())
        self._introductions.add_node(node)
        busy = filter(attrgetter("legs"), self._nodes.values())  # in C, as there may be thousands
        is_canary = any(other.role is node.role for other in busy)
        health = NodeHealth(node.name, self._note_change, is_canary=is_canary, clock=self.clock)
        node.start_measuring(self._rates, health, self.clock)
        self._nodes[node.engine_id] = node
        self._beats.note_joined(node)
        self.gate.note_joined(node)
        self.lost_nodes.note_joined(node.engine_id, node.name)
        self.lost_nodes.forget(node.name)
        self._roles_seen.add(node.registration.role)
        self._has_had_alone |= node.registration.computes_prompts
        if node.registration.role in PAIR_ROLES:
            self._has_had_encoders |= node.registration.encodes_images
        revision = node.registration.revision
        if not self.rollout.knows(revision):
            self.rollout.note_joined(revision, {one.load.revision for one in self.members})
        self._note_kv_size(node, 1)
        self._note_change()
        logger.info("%s node %s joined", node.registration.role.value, node.name)
        if not self._review_identity(joined=node.identity):
            self._index(node)
        if problem := self.identity.problem(node):
            logger.warning("%s gets no requests: %s", node.name, problem)

    def remove(self, node: Node, why: str = "went away", *, on_purpose: bool = False) -> None:
        """Remove a node, end its attempts and tell its peers.

        Args:
            why: what happened to the node, as a verb with "it" as subject, for errors and the log.
            on_purpose: whether the router decided to remove it; if so, no request is suspected of
                killing it.
        """
        if self._nodes.get(node.engine_id) is not node:
            return  # the node was removed or replaced before
        del self._nodes[node.engine_id]
        self.gate.note_left(node)
        if node.changes_weights:
            self.lost_nodes.note_missing(node.registration)
        elif not (on_purpose or node.is_draining):
            # If the router was held up, the node hung up for this reason, and is not lost. Encode
            # nodes get no attempts, so no request is suspected of ending one.
            if not self._is_held_up and node.registration.role in PAIR_ROLES:
                self.lost_nodes.note_loss(node.engine_id, node.name, node.num_open)
            self.lost_nodes.note_missing(node.registration)
        reason = "left after its drain" if node.is_draining and not on_purpose else why
        self.lost_nodes.note_left(node.engine_id, node.name, reason)
        self.prefix_index.remove(node.engine_id)
        self.encode_places.forget(node.engine_id)
        self.prefix_sources.forget(node.engine_id)
        logger.info("%s node %s %s", node.registration.role.value, node.name, why)
        self._review_identity(left=node.identity if node.is_draining else None)
        self._reach.forget(node.engine_id)
        node.replies.close(f"it {why}")
        self._introductions.remove_node(node)
        self._note_kv_size(node, -1)
        node.fail_legs(why)
        self._note_change()

    def _review_identity(
        self, *, left: Identity | None = None, joined: Identity | None = None
    ) -> bool:
        """Choose the served identity again; if it changed, index the nodes' caches again.

        Returns whether the identity changed.
        """
        is_another = self.identity.review(self._nodes.values(), left=left, joined=joined)
        if is_another:
            for node in self._nodes.values():
                self._index(node)
            self._note_change()
        return is_another

    def _index(self, node: Node) -> None:
        registration = node.registration
        if not self.identity.admits(node):
            self.prefix_index.remove(node.engine_id)
        elif registration.prefix_hash in HASH_ALGORITHMS:
            kind = HashKind(
                registration.block_size,
                registration.prefix_hash,
                cache_namespace(registration.compatibility),
            )
            self.prefix_index.add_node(node.engine_id, kind)
            node.send(SendKVSnapshot())

    def _note_kv_size(self, node: Node, count: int) -> None:
        """Set the KV size per token, for estimates of transfer times: the median over all nodes.

        Args:
            count: 1 for a node that joined; -1 for a node that left.
        """
        sizes = self._kv_sizes
        if size := node.registration.kv_bytes_per_token:
            sizes[size] += count
        # Most fleets have one size or two
        before, half = 0, (sizes.total() + 1) // 2
        for size in sorted(sizes):
            before += sizes[size]
            if before >= half > 0:
                self._rates.kv_bytes_per_token = size
                return
        self._rates.kv_bytes_per_token = 0.0

    def expel(self, name: str) -> NodeRegistration:
        """Remove a node at once, by name or engine id; its process can never join again.

        A node that is missing is no longer expected.

        Raises NotFoundError if no node of this name has joined or is missing.
        """
        if (node := self.find_node(name)) is not None:
            self.gate.expel(node.engine_id)
            self.remove(node, "was removed by an operator", on_purpose=True)
            self._review_identity(left=node.identity)
            # If the node still reads its link, this command ends its process in an orderly way.
            node.send(DrainCommand(stop=True))
            node.hang_up()
            return node.registration
        for lost in self.lost:
            if name in (lost.node_name, lost.engine_id):
                self.gate.expel(lost.engine_id)
                self.lost_nodes.forget(lost.node_name)
                self._review_identity(left=identity_of(lost.compatibility))
                self._note_change()
                return lost
        raise no_such_node(name, self.lost_nodes)

    def count_missed_beats(self, num_intervals: int = 1) -> None:
        """Count the missed beats of each node; remove silent nodes, and send late ones a beat.

        Call this every ``num_intervals`` beat intervals. Intervals are counted instead of seconds,
        so that a stall of this router does not make nodes look silent.
        """
        if self._is_late:
            self._held_up_until = self.clock() + HELD_UP_FOR_S
        self._counted_at = now = self.clock()
        self._beats.num_expected = self.gate.num_nodes + self._introductions.num_awaited
        self.prefix_index.merge_some()
        for node in list(self._nodes.values()):
            node.watch()
            if self._beats.note_intervals(node, node.count_intervals(now, num_intervals)):
                self.remove(node, f"is silent (missed {self._beats.max_missed} beats)")
                node.hang_up()

    @property
    def _is_late(self) -> bool:
        """Return whether beats were last counted too long ago, because this process stalled."""
        return self._counted_at is not None and self.clock() - self._counted_at > HELD_UP_S

    @property
    def _is_held_up(self) -> bool:
        """Return whether this process has stalled lately, so that nodes may have hung up."""
        return self._is_late or self.clock() < self._held_up_until

    def hang_up(self, node: Node, problem: str) -> None:
        """End the link of a node that sent an impossible value; the node may join again."""
        logger.warning("hung up on %s, which said something impossible: %s", node.name, problem)
        self.remove(node, "said something impossible", on_purpose=True)
        node.hang_up()

    def on_event(self, node: Node, event: NodeEvent, *, is_checked: bool = False) -> None:
        """Handle an event from a node; end the node's link if the event is impossible."""
        if self._nodes.get(node.engine_id) is not node:
            return  # the node was removed, but its link has not ended yet
        problem = "" if is_checked else event_problem(node.registration, event, self.vocabulary)
        if problem:
            self.hang_up(node, problem)
            return
        node.num_missed_beats, node.owes_beat = 0, False
        if isinstance(event, StepDeltas):
            node.deliver_step(event)
        elif isinstance(event, NodeBeat):
            self._take_beat(node, event)
        elif isinstance(event, KVCacheEvents):
            if self.prefix_index.apply_events(node.engine_id, event):
                logger.warning("%s: KV cache events were lost; asking for all again", node.name)
                node.send(SendKVSnapshot())
        elif isinstance(event, AdminReply):
            node.replies.on_reply(event)
        elif isinstance(event, PeerReport):
            self._take_reports(node, PeerReports((event,)))
        elif isinstance(event, PeerReports):
            self._take_reports(node, event)

    def _take_reports(self, node: Node, event: PeerReports) -> None:
        """Note reports on peers; make a new fleet unless only bandwidths have changed.

        After a restart of the router, each node reports on hundreds of peers at once.
        """
        num_before, strangers, peers = self._num_news, list[PeerReport](), list[Node]()
        best = 0.0 if self._fleet is None else self._fleet.best_bandwidth
        compatibility, fits, nodes = None, False, self._nodes
        for report in event.reports:
            peer = nodes.get(report.engine_id)
            if peer is None:
                if not (is_prefix_end(report.engine_id) and self._take_prefix_report(node, report)):
                    strangers.append(report)
                continue
            # Equal nodes share a mapping, so most peers differ in nothing from the one before
            theirs = peer.registration.compatibility
            if theirs is not compatibility or NodeRole.ENCODE in (node.role, peer.role):
                compatibility, fits = theirs, are_peers(node, peer)
            if not fits or peer.role is node.role:
                continue
            if report.problem:
                report = _with_short_problem(node, report)
            self._num_news += _is_news(node.reports.get(peer.engine_id), report, best)
            node.reports[peer.engine_id] = report
            peers.append(peer)
        # The introduction of a node that has just joined notes all pairs.
        if self._introductions.has_introduced(node):
            self._reach.note_reports(node, peers)
        was_introduced = self._introductions.note_reports(node, strangers)
        self._introductions.introduce_again(node, event)
        if self._num_news != num_before or was_introduced or event.unknown:
            self._note_change()

    def _take_prefix_report(self, node: Node, report: PeerReport) -> bool:
        """Note a report on a peer's end for cached prefixes; return whether the peer has joined.

        A fleet does not depend on these ends, so the report needs no new fleet.
        """
        peer = self._nodes.get(node_of(report.engine_id))
        if peer is None:
            return False
        if are_peers(node, peer, by_prefixes=True):
            if report.problem:
                report = _with_short_problem(node, report)
            self.prefix_sources.note_report(node, peer, report)
        return True

    def _take_beat(self, node: Node, beat: NodeBeat) -> None:
        self._beats.answer(node)
        was_draining, had = node.is_draining, node.beat.adapters
        node.load.note_beat(beat)
        if beat.adapters != had:
            self._wake_waiting()  # wakes calls that wait for a free adapter slot
        self._watch_progress(node)
        if node.is_draining:
            # Sent for every beat, because the node may have served requests since its last beat.
            node.send(DrainSeen())
        if node.is_draining is not was_draining:
            logger.info("%s is %s", node.name, beat.serving_state.value)
            self._review_identity()
            self._note_change()

    def _watch_progress(self, node: Node) -> None:
        """Mark a node as stuck, or as no longer stuck.

        A node is marked as stuck only if another node can do its work; prefill nodes can do the
        work of an encode node. A stuck process ends itself a little later; if it goes on instead,
        it is used again.
        """
        is_stuck = node.looks_stuck(self._engine_timeout_s)
        if is_stuck is node.is_stuck or (is_stuck and not self._is_replaceable(node)):
            return
        node.is_stuck = is_stuck
        self._note_change()
        if is_stuck:
            if node.registration.role in PAIR_ROLES:
                self.lost_nodes.note_loss(node.engine_id, node.name, node.num_open)
            why = f"stands still: its {node.beat.stalled_thread} thread is busy with one thing for "
            node.fail_legs(f"{why}{node.beat.stalled_s:g} s")
        else:
            self.lost_nodes.note_joined(node.engine_id, node.name)
        logger.warning("%s %s", node.name, "stands still" if is_stuck else "goes on")

    def _is_replaceable(self, node: Node) -> bool:
        """Return whether another node that may get requests can do a node's work."""
        role = node.registration.role
        others = (one for one in self._of(role) if one is not node)
        return role not in PAIR_ROLES or any(map(self.is_eligible, others))

    # ------------------------------------------------------------------ pairs

    @property
    def fleet(self) -> Fleet:
        """The nodes that may get requests now, and which pairs of them are connected."""
        if self._fleet is None:
            made = make_fleet(
                filter(self.is_eligible, self._nodes.values()),
                self._reach,
                may_self_prefill=self._may_self_prefill,
            )
            self._fleet = self.rollout.admit(made)
        return self._fleet

    @property
    def prompt_fleet(self) -> Fleet:
        """The prefill nodes that may now get pooled prompts, which need no decode node."""
        if self._prompt_fleet is None:
            ready = filter(self.is_eligible, self._nodes.values())
            self._prompt_fleet = make_prompt_fleet(ready, self.rollout.may_serve)
        return self._prompt_fleet

    @property
    def reachable_encode_nodes(self) -> set[str]:
        """Engine ids of encode nodes that may get images and are connected to a prefill node."""
        reached = self._reach.bandwidths
        ready = filter(self.is_eligible, self._of(NodeRole.ENCODE))
        return {node.engine_id for node in ready if reached.get(node.engine_id)}

    @property
    def num_pairs_connected(self) -> int:
        """Number of connected pairs of nodes, including nodes that get no requests."""
        return sum(map(len, self._reach.bandwidths.values()))

    @property
    def num_pairs_down(self) -> int:
        """Number of compatible pairs in which a node is lost or does not reach the other node."""
        return self._reach.num_down + num_pairs_lost(self._nodes.values(), self.lost)

    def list_slowest_pairs(self, most: int) -> list[tuple[float, str, str]]:
        """Return bandwidth, prefill and decode node of the slowest connected pairs."""
        prefills = [node.engine_id for node in self._of(NodeRole.PREFILL)]
        return self._reach.list_slowest(prefills, most)

    def is_eligible(self, node: Node) -> bool:
        """Return whether a node may get new requests, whatever its health."""
        return (
            not (node.is_draining or node.is_stuck)
            and self.identity.admits(node)
            and all(allows(node) for allows in self._eligibility)
        )

    def allow_self_prefill(self, may_self_prefill: bool) -> None:
        """Set whether decode nodes may compute prompts themselves."""
        self._may_self_prefill = may_self_prefill
        self._note_change()

    def note_eligibility_change(self) -> None:
        """Make a new fleet and wake waiting calls: a node's eligibility may have changed."""
        self._note_change()

    def why_no_pair(
        self, num_tokens: int = 1, adapter: str = "", *, has_images: bool = False
    ) -> str:
        """Return a reason, in one line for a client, why no pair of nodes can take a request.

        Args:
            num_tokens: length of the request.
            adapter: digest of the adapter that both nodes must have or load; empty: none.
            has_images: whether the node that computes the prompt must encode images.
        """
        if self.fleet and has_images and not self.fleet.encoding_images():
            return "no node that computes prompts encodes images now"
        if self.fleet and adapter and not self.adapters.narrow(self.fleet, adapter):
            why = self.adapters.why_not((node.load for node in self.nodes), adapter)
            return f"no pair of nodes can load the adapter {shorten_digest(adapter)}: {why}"
        if self.fleet:
            return f"no pair of nodes takes requests of {num_tokens} tokens"
        return why_no_pair(
            self._of(NodeRole.PREFILL),
            self._of(NodeRole.DECODE),
            self.is_eligible,
            self.identity.problem,
        )

    def why_no_prompt_node(self, num_tokens: int, adapter: str = "") -> str:
        """Return a reason, in one line for a client, why no prefill node can take a pooled prompt.

        For the arguments, see `why_no_pair`.
        """
        nodes = self._of(NodeRole.PREFILL)
        if not nodes:
            return "no prefill node has joined the router"
        if not self.prompt_fleet:
            foreign = next(filter(None, map(self.identity.problem, nodes)), "")
            return foreign or "no prefill node takes requests now: all of them drain or fail"
        if adapter and not self.adapters.narrow(self.prompt_fleet, adapter):
            why = self.adapters.why_not((node.load for node in nodes), adapter)
            return f"no prefill node can load the adapter {shorten_digest(adapter)}: {why}"
        return f"no prefill node takes prompts of {num_tokens} tokens"

    def _note_change(self) -> None:
        self._fleet = self._prompt_fleet = self._missing_since = None
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # calls that wait from now on wait for the next change

    def _of(self, role: NodeRole) -> list[Node]:
        return [node for node in self._nodes.values() if node.registration.role is role]


def _is_news(known: PeerReport | None, report: PeerReport, best_bandwidth: float) -> bool:
    """Return whether a report says more than another bandwidth; the highest one is news, too.

    Bandwidths of pairs that send KV change every few seconds, and a new fleet of a thousand nodes
    takes milliseconds.

    Args:
        known: the node's report before; None: there is none.
        best_bandwidth: the fleet's highest known bandwidth.
    """
    return (
        known is None
        or known.connected is not report.connected
        or known.problem != report.problem
        or report.bandwidth_bytes_per_s > best_bandwidth
    )


def _with_short_problem(node: Node, report: PeerReport) -> PeerReport:
    """Log a node's problem with a peer; return the report with a problem that may be kept.

    Problems are shortened, because one is kept for each pair of nodes, and characters that could
    control a terminal are escaped.
    """
    problem = printable(report.problem[:MAX_KEPT_CHARS])[:MAX_KEPT_CHARS]
    logger.warning("%s cannot reach %s: %s", node.name, report.engine_id, problem)
    return msgspec.structs.replace(report, problem=problem)
