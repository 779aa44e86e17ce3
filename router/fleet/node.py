"""Node: one joined node, with its link, its open legs, and the load that the router counts.

A leg is one node's part of an attempt. The node passes deltas to the attempts that wait for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.api.outputs import FinishReason
from baton.api.pooling import PoolingParams
from baton.api.printable import printable
from baton.checkpoint.model_identity import Identity, identity_of
from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.link.beat_pace import INTERVALS_AT_REST, more_patience
from baton.link.words import (
    NodeBeat,
    NodeRegistration,
    NodeRole,
    PeerReport,
    RequestDelta,
    RequestError,
    RouterCommand,
    ServingState,
    StepDeltas,
    failed_delta,
)
from router.fleet.admin_replies import AdminReplies
from router.fleet.health import NodeHealth
from router.fleet.load.forecast import PrefillForecast
from router.fleet.load.node_load import Account, NodeLoad, SharedRates

# A prefill node is stalled if it finished no prompt for `STALLED_S`, and for `STALLED_FACTOR` times
# the predicted seconds of its queued prompts.
STALLED_S, STALLED_FACTOR = 5.0, 10.0
# A node's thread looks stuck if its current round lasts this many times as long as the node's
# longest earlier round. Earlier rounds above `LONGEST_ROUND_S` count as `LONGEST_ROUND_S`.
ROUND_FACTOR, LONGEST_ROUND_S = 3.0, 15.0


# A node that missed this many beats is silent, and is blamed if an attempt on it and a peer fails.
# Soon afterwards, the node either sends beats again or is declared lost.
SILENT_BEATS = 2
# Maximum number of a lost node's attempts that are ended in one round of the event loop: more would
# block other requests.
LEGS_AT_ONCE = 64


class LegDelta(msgspec.Struct, frozen=True, gc=False):
    """A delta, and the role of the node that it came from.

    Attributes:
        node_lost: whether the router made this delta itself, because the link broke or the node is
            silent.
    """

    role: NodeRole
    delta: RequestDelta
    node_lost: bool = False


class LegReader(Protocol):
    """The receiver of an attempt's deltas.

    The methods must not wait, because a link serves many attempts.
    """

    def on_leg_delta(self, item: LegDelta) -> None:
        """Handle a delta of any kind."""

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        """Handle a token without other data, which is by far the most frequent delta."""


def num_bytes_of(registration: NodeRegistration) -> int:
    """Return the size in bytes of what the router keeps of a registration while the node lives."""
    entries = registration.compatibility
    texts = sum(map(sys.getsizeof, (*entries, *entries.values())))
    infos = (
        registration.peer_info,
        registration.encodings_peer_info,
        registration.fetch_peer_info,
        registration.share_peer_info,
    )
    return sum(map(len, infos)) + texts


@dataclass(frozen=True, slots=True, kw_only=True)
class LegWork:
    """The work that an attempt asks of a node, in tokens; see `Account`.

    Attributes:
        num_tokens: on a decode node, maximum number of tokens that the request may hold; on a
            prefill node, number of tokens to compute.
        num_cached: number of the prompt's tokens before ``num_uncomputed``, which the node has.
        max_tokens: number of tokens to decode within ``timeout_s``; 0: none.
        arrives_s: seconds until the prompt's KV is expected on the node.
        fetch_s: seconds that the request is expected to wait for a cached prefix after its queue;
            0: no prefix.
        is_pooled: whether the prompt's hidden states are pooled, and no token is sampled.
    """

    num_tokens: int
    num_uncomputed: int = 0
    num_cached: int = 0
    num_arriving: int = 0
    max_tokens: int = 0
    timeout_s: float = math.inf
    arrives_s: float = 0.0
    fetch_s: float = 0.0
    is_pooled: bool = False

    @classmethod
    def of_prompt(
        cls, num_tokens: int, num_cached: int, fetch_s: float, pooling: PoolingParams | None
    ) -> LegWork:
        """Return the work of a prefill node that computes ``num_tokens`` tokens of a prompt."""
        return cls(
            num_tokens=num_tokens,
            num_uncomputed=num_tokens,
            num_cached=num_cached,
            fetch_s=fetch_s,
            is_pooled=pooling is not None,
        )


@dataclass(slots=True)
class _Leg:
    """An open attempt on a node, and what it adds to the node's load."""

    request_id: str
    reader: LegReader
    account: Account


@dataclass(slots=True, eq=False)
class Node:
    """One joined node.

    Attributes:
        send: sends a command over the node's link.
        hang_up: ends the link; a living node opens a new one.
        reports: the node's reports about its peers, by the peer's engine id.
        load: the load that policies read; only this node and its pool change it. The pool sets
            ``load``, ``health`` and ``clock`` when the node joins.
        health: decides whether the node should get requests.
        legs: open attempts on this node, by epoch.
        answered_at: when the router last sent the node a beat, mostly as an answer.
        intervals_at_rest: how many beat intervals the node was told to wait at rest.
        owes_beat: whether the node got a request since its last message. A node at rest that gets a
            request sends a beat within one interval, so it is lost as soon as a busy node.
        clock: returns monotonic seconds.
        is_stuck: whether the node sends beats, but one of its threads makes no progress.
        replies: the node's answers to operators' questions.
        identity: values that identify the model that the node runs.
        address: remote address of the node's link, without the port.
        num_bytes: size of the node's registration in bytes.
        changes_weights: whether an operator told the node to change its weights; it then drains,
            leaves, and joins again.
        name, engine_id, role: as in the registration; attributes, because they are read often.
    """

    registration: NodeRegistration
    send: Callable[[RouterCommand], None]
    reports: dict[str, PeerReport] = field(default_factory=dict)
    legs: dict[int, _Leg] = field(default_factory=dict)
    hang_up: Callable[[], None] = lambda: None
    num_missed_beats: int = 0
    answered_at: float = -math.inf
    intervals_at_rest: int = INTERVALS_AT_REST
    owes_beat: bool = False
    is_stuck: bool = False
    replies: AdminReplies = field(default_factory=AdminReplies)
    address: str = ""
    changes_weights: bool = False
    name: str = field(init=False)
    engine_id: str = field(init=False)
    role: NodeRole = field(init=False)
    num_bytes: int = field(init=False)
    clock: Callable[[], float] = field(init=False)
    load: NodeLoad = field(init=False)
    health: NodeHealth = field(init=False)
    identity: Identity = field(init=False)

    def __post_init__(self) -> None:
        registration = self.registration
        self.name, self.engine_id = registration.node_name, registration.engine_id
        self.role = registration.role
        self.identity = identity_of(self.registration.compatibility)
        self.num_bytes = num_bytes_of(self.registration)

    def start_measuring(
        self, shared: SharedRates, health: NodeHealth, clock: Callable[[], float]
    ) -> None:
        """Set the node's load, health and clock when it joins a pool."""
        self.clock = clock
        self.load = NodeLoad(self.registration, shared, clock)
        self.health = health

    def share_compatibility(self, others: Iterable[Node]) -> None:
        """Use another node's mapping if both are equal, to save memory in large fleets."""
        for other in others:
            if other.registration.compatibility == self.registration.compatibility:
                same = other.registration.compatibility
                self.registration = dataclasses.replace(self.registration, compatibility=same)
                self.identity = other.identity
                return

    @property
    def weights(self) -> str:
        """Version of the model weights on the node; empty: unknown."""
        return self.registration.compatibility.get("weights", "")

    @property
    def num_open(self) -> int:
        """Number of attempts open on this node."""
        return len(self.legs)

    @property
    def is_draining(self) -> bool:
        """Return whether the node takes no new requests, because it drains or has drained."""
        return self.beat.serving_state is not ServingState.SERVING

    @property
    def is_silent(self) -> bool:
        """Return whether the node has missed more beats than `SILENT_BEATS`."""
        not_counted = self.intervals_at_rest - 1 if self.rests else 1
        return self.num_missed_beats > SILENT_BEATS + not_counted

    @property
    def beat(self) -> NodeBeat:
        return self.load.beat

    @property
    def rests(self) -> bool:
        """Return whether the node rested at its last beat, and got no request since then."""
        return self.beat.rests and not self.owes_beat

    @property
    def rests_punctually(self) -> bool:
        """Return whether the node rests, and its next beat is not late."""
        return self.rests and self.num_missed_beats <= self.intervals_at_rest

    def count_intervals(self, now: float, num_intervals: int) -> int:
        """Return how many of the last beat intervals have ended since the node's last beat.

        A beat of a node at rest is answered at once, so ``answered_at`` tells when it came.

        Args:
            num_intervals: number of intervals since the last count.
        """
        is_recent = now - self.answered_at < BEAT_INTERVAL_S
        return 1 if is_recent or not self.rests else num_intervals

    def watch(self) -> None:
        """Eject the node if it is stalled, and update its weight; call at each count of beats."""
        load = self.load
        # A node that reads adapter files is not stalled, and neither is a node whose prompts all
        # wait for images or for cached KV.
        if self.beat.num_waiting_for_adapters or load.awaits_data:
            load.note_stalled()
        if (stalled_s := load.stalled_s) > STALLED_S + STALLED_FACTOR * load.prefill_queue_s:
            self.health.eject(f"no progress for {stalled_s:.0f} s")
            load.note_stalled()
        self.health.tick()
        load.weight = self.health.weight

    def looks_stuck(self, timeout_s: float) -> bool:
        """Return whether the current round of one of the node's threads lasts suspiciously long.

        The round must last at least ``timeout_s``, and several times as long as any round that
        ended before.
        """
        longest_s = min(self.beat.longest_round_s, LONGEST_ROUND_S)
        return self.beat.stalled_s >= max(timeout_s, ROUND_FACTOR * longest_s)

    def fail_legs(self, why: str) -> None:
        """End all attempts on this node with UNAVAILABLE, because the node is lost."""
        error = RequestError(
            "UNAVAILABLE", f"{self.registration.role.value} node {self.name} {why}"
        )
        self._fail_all(error, node_lost=True)

    def preempt_legs(self, why: str) -> None:
        """End all attempts on this node with PREEMPTED, so that their calls move to other nodes."""
        error = RequestError("PREEMPTED", f"{self.registration.role.value} node {self.name} {why}")
        self._fail_all(error)

    def _fail_all(self, error: RequestError, *, node_lost: bool = False) -> None:
        """End all attempts on this node, at most `LEGS_AT_ONCE` per round of the event loop."""
        deltas = [failed_delta(leg.request_id, epoch, error) for epoch, leg in self.legs.items()]
        self._fail_some(iter(deltas), node_lost)

    def _fail_some(self, deltas: Iterator[RequestDelta], node_lost: bool) -> None:
        some = list(itertools.islice(deltas, LEGS_AT_ONCE))
        for delta in some:
            self.deliver(delta, node_lost=node_lost)
        if len(some) == LEGS_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._fail_some, deltas, node_lost)

    def open_leg(self, request_id: str, epoch: int, reader: LegReader, work: LegWork) -> None:
        """Count an attempt's work on this node, and pass its deltas to ``reader`` from now on."""
        load, promise = self.load, None
        if work.max_tokens:
            num_steps, now = min(work.max_tokens, load.shared.long_output_tokens), self.clock()
            promise = load.promises.open(now + work.timeout_s, num_steps, now + work.arrives_s)
        account = load.note_opened(
            work.num_tokens,
            num_uncomputed=work.num_uncomputed,
            num_cached=work.num_cached,
            num_arriving=work.num_arriving,
            promise=promise,
            fetch_s=work.fetch_s,
            is_pooled=work.is_pooled,
        )
        self.legs[epoch] = _Leg(request_id, reader, account)
        self.health.note_open(len(self.legs))
        if self.rests:
            # A node at rest may miss more beats than a busy one (`BeatWatch.note_intervals`). This
            # difference is forgiven, and no more, so that a request never postpones a loss.
            missed = self.num_missed_beats
            forgiven = 1 + more_patience(self.intervals_at_rest)
            self.num_missed_beats = max(missed - forgiven, min(missed, 1))
        self.owes_beat = True

    def forecast_of(self, epoch: int) -> PrefillForecast | None:
        """Return the expected times of an attempt's prompt.

        Returns None if this node does not compute the prompt, or has computed it already.
        """
        leg = self.legs.get(epoch)
        return None if leg is None else leg.account.forecast

    def relieve_leg(self, epoch: int) -> None:
        """Take an attempt's prompt off the load, because it is computed; deltas may still come."""
        leg = self.legs.get(epoch)
        if leg is not None:
            self.load.note_computed(leg.account)

    def close_leg(self, epoch: int) -> None:
        """End an attempt's work on this node, and drop its later deltas; safe to repeat."""
        leg = self.legs.pop(epoch, None)
        if leg is not None:
            self.health.note_open(len(self.legs))
            self.load.note_closed(leg.account)

    def deliver(self, delta: RequestDelta, *, node_lost: bool = False) -> None:
        """Pass a delta to its attempt, or drop it if the attempt has ended."""
        self._note_prefilled((delta,))
        self._pass_on_delta(delta, node_lost=node_lost)

    def _pass_on_delta(self, delta: RequestDelta, *, node_lost: bool = False) -> None:
        """Pass a delta to its attempt, or drop it if the attempt has ended; measure no prompts."""
        leg = self._leg_of(delta)
        if leg is not None:
            # The error comes from a node: escape characters that could control a terminal
            if delta.error is not None:
                error = RequestError(printable(delta.error.code), printable(delta.error.message))
                delta = msgspec.structs.replace(delta, error=error)
            self._learn(leg, delta)
            leg.reader.on_leg_delta(LegDelta(self.registration.role, delta, node_lost))

    def deliver_step(self, step: StepDeltas) -> None:
        """Pass the tokens and deltas of one engine step to their attempts."""
        legs, role = self.legs, self.registration.role
        is_decode = role is NodeRole.DECODE
        # The columns come from a node, so their lengths may differ.
        rows = zip(step.epochs, step.output_indexes, step.token_ids, strict=False)
        for epoch, output_index, token_id in rows:
            leg = legs.get(epoch)
            if leg is not None:
                if leg.account.begun_at is None and is_decode:
                    self._begin(leg)
                leg.reader.on_token(role, output_index, token_id)
        self._note_prefilled(step.deltas)
        for delta in step.deltas:
            self._pass_on_delta(delta)
        if is_decode:
            self.load.note_step()

    def _leg_of(self, delta: RequestDelta) -> _Leg | None:
        leg = self.legs.get(delta.epoch)
        return leg if leg and leg.request_id == delta.request_id else None

    def _note_prefilled(self, deltas: Sequence[RequestDelta]) -> None:
        """Measure the prompts that one step finished, as these deltas report."""
        receipts, accounts = [], []
        for delta in deltas:
            if delta.prefill and (leg := self._leg_of(delta)):
                receipts.append(delta.prefill)
                accounts.append(leg.account)
        if receipts:
            self.load.note_prefilled(receipts, accounts)

    def _learn(self, leg: _Leg, delta: RequestDelta) -> None:
        """Update the node's health and load by what a delta reports."""
        if delta.prefill is not None:
            self.health.note_success()
        if self.registration.role is NodeRole.PREFILL or delta.error is not None:
            return
        if leg.account.begun_at is None:
            self._begin(leg)
        begun_at = leg.account.begun_at
        if delta.decode is not None and begun_at is not None:
            is_cut = delta.finish_reason is FinishReason.LENGTH
            num_tokens = delta.output_index + len(delta.token_ids)
            self.load.note_decoded(num_tokens, self.clock() - begun_at, is_cut=is_cut)
            self.load.note_prompt_time(leg.account, delta.decode.first_step_s)

    def _begin(self, leg: _Leg) -> None:
        """Note that this decode node sent an attempt's first token."""
        self.health.note_success()
        self.load.note_begun(leg.account)
