"""PushTracker: which blocks of each request may be transferred, and which are still in use.

Turns scheduled and computed steps into pushes for the sender. Holds a reference on each block until
the event that ends the block's transfer, so that a request may end at any time.

A logical block is ``block_size`` tokens: one block in each KV cache group. In a group whose layers
attend only to a sliding window, blocks before the prompt's last window are not transferred:

    logical block     0    1    2    3          * travels
    full attention    *    *    *    *
    sliding window              *    *
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.api.outputs import RequestDelta
from baton.link.words import AbortAll, RequestView
from baton.telemetry.ledger import BlockHolding, BlockOwner
from engine.core.outputs import ScheduledRequest, SchedulerOutput
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import (
    BlockPush,
    HandoffMetrics,
    HandoffRecord,
    TransferEvent,
    TransferEventKind,
    TransferOutcome,
)
from kvconnector.ends import Sender
from node_runtime.reports.operator_views import view_request
from prefill_node.layer_tail import LayerTail, LayerTails
from prefill_node.options import PushMode


@dataclass(slots=True)
class _Handoff:
    """One request whose KV is being handed over to a decode node.

    Attributes:
        places: places of the transferred blocks in ``Request.block_ids``, which lists the groups'
            blocks of logical block 0, then those of logical block 1, and so on.
        epoch: number of the router's attempt.
        engine_id: engine id of the decode node.
        block_ids: ids of the transferred blocks that are allocated so far.
        start_is_sent: whether the `Start` message was sent to the decode node.
        held_block_ids: ids of all blocks referenced here, also those from before a preemption.
        tail: pushes the blocks from ``tail_first`` on, some layers at a time; None: no tail.
    """

    request: Request
    places: list[int]
    epoch: int
    engine_id: str
    added_at: float
    expires_at: float
    start_is_sent: bool = False
    block_ids: list[int] = field(default_factory=list)
    held_block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_blocks_pushed: int = 0
    tail: LayerTail | None = None
    tail_first: int = 0

    @property
    def state(self) -> str:
        """Return the name of the state, for operators."""
        if not self.start_is_sent:
            return "QUEUED"
        return "PUSHING" if self.num_blocks_pushed else "STARTED"


def _ends_prompt(item: ScheduledRequest) -> bool:
    """Return whether the step computes the last of the tokens known when the request arrived."""
    request = item.request
    start = request.num_computed_tokens + request.num_tokens_in_flight
    return start + item.num_scheduled_tokens == request.num_initial_tokens


def _holding(owner: BlockOwner, handoff: _Handoff, now: float) -> BlockHolding:
    return BlockHolding(
        owner=owner,
        block_ids=tuple(handoff.held_block_ids),
        request_id=handoff.request.request_id,
        epoch=handoff.epoch,
        state=handoff.state,
        peer=handoff.engine_id,
        age_s=now - handoff.added_at,
    )


class PushTracker:
    """The hand-offs of one prefill node.

    Args:
        engine: owner of the blocks and of their reference counts.
        sender: sends the pushed blocks.
        mode: when blocks are pushed. With `PushMode.LAYERS`, the last chunk is sent in groups of
            layers if the model allows this (`LayerTails`), and otherwise whole, with token 1.
        clock: returns seconds, never going back.
    """

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        mode: PushMode = PushMode.LAYERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._sender = sender
        self._mode = mode
        self._tails = LayerTails(engine, sender)
        self._has_tail = mode is PushMode.LAYERS and self._tails.has_any
        self._block_size = engine.kv_memory.spec.block_size
        self._num_groups = engine.kv_memory.spec.num_groups
        self._handoffs: dict[str, _Handoff] = {}
        # Hand-offs that ended here although writes may be in flight, by (request_id, epoch).
        self._draining: dict[tuple[str, int], _Handoff] = {}
        self._ended: Counter[TransferOutcome] = Counter()

    def track_request(self, request: Request, epoch: int, engine_id: str, timeout_s: float) -> None:
        """Register a request whose KV a decode node will receive.

        Ends an older attempt's hand-off; its blocks stay referenced while writes are in flight.
        """
        self.drop(request.request_id, "")
        now = self._clock()
        self._handoffs[request.request_id] = _Handoff(
            request,
            self._engine.kv_cache_manager.handoff_places(request.num_initial_tokens),
            epoch,
            engine_id,
            added_at=now,
            expires_at=now + timeout_s,
        )

    def before_step(self, scheduled: SchedulerOutput) -> Callable[[int], None] | None:
        """Send `Start` for requests whose first chunk is scheduled; hold all new blocks.

        Returns a function to call after each layer of the step; None: no blocks are sent by layers.
        """
        tail: LayerTail | None = None
        for item in scheduled.scheduled:
            handoff = self._handoffs.get(item.request.request_id)
            if handoff is None:
                continue
            request = handoff.request
            is_first = not handoff.start_is_sent
            if is_first:
                handoff.start_is_sent = True
                self._sender.start(
                    request.request_id,
                    handoff.epoch,
                    handoff.engine_id,
                    num_tokens=request.num_initial_tokens,
                    num_blocks=len(handoff.places),
                    groups=[place % self._num_groups for place in handoff.places]
                    if self._num_groups > 1
                    else (),
                )
            # After a preemption, the prompt is computed again in other blocks.
            if request.num_preemptions != handoff.num_preemptions:
                handoff.num_preemptions = request.num_preemptions
                handoff.block_ids.clear()
            # Transferred blocks stay in the window until the prompt's end, so none was freed.
            first, end = len(handoff.block_ids), len(request.block_ids)
            new_places = handoff.places[first : bisect.bisect_left(handoff.places, end)]
            new_block_ids = [request.block_ids[place] for place in new_places]
            self._engine.block_pool.hold(new_block_ids)
            handoff.block_ids += new_block_ids
            handoff.held_block_ids += new_block_ids
            # The cached prefix is complete already, so push its blocks before the step.
            if is_first and self._mode is not PushMode.AFTER_PREFILL:
                self._push(handoff, request.num_computed_tokens // self._block_size, None)
            if self._has_tail and _ends_prompt(item):
                tail = tail or self._tails.make_tail()
                self._add_tail(handoff, tail)
        return None if tail is None else tail.after_layer

    def after_step(self, scheduled: SchedulerOutput, outputs: Mapping[str, RequestDelta]) -> None:
        """Push the blocks that became full; with token 1, push the rest.

        Args:
            outputs: outputs of the step that a decode node continues, by request id.
        """
        for item in scheduled.scheduled:
            handoff = self._handoffs.get(item.request.request_id)
            if handoff is None:
                continue
            output = outputs.get(item.request.request_id)
            num_tokens = handoff.request.num_computed_tokens
            if output is None and self._mode is PushMode.AFTER_PREFILL:
                continue
            if output is None:  # the last block is not full yet
                self._push(handoff, num_tokens // self._block_size, None)
            else:
                self._push(handoff, -(-num_tokens // self._block_size), output.token_ids[0])

    def drop(self, request_id: str, reason: str, epoch: int | None = None) -> None:
        """End a hand-off early; do nothing if the hand-off is unknown.

        Args:
            reason: error for the decode node's client; empty: no client waits for the decode node.
            epoch: the attempt to end; None: any attempt.
        """
        handoff = self._handoffs.get(request_id)
        if handoff is None or epoch not in (None, handoff.epoch):
            return
        del self._handoffs[request_id]
        if not handoff.start_is_sent:
            self._engine.block_pool.release(handoff.held_block_ids)
            return
        self._draining[request_id, handoff.epoch] = handoff
        self._sender.abort(request_id, handoff.epoch, reason)

    def has(self, request_id: str, epoch: int) -> bool:
        """Return whether the hand-off of this attempt is open."""
        handoff = self._handoffs.get(request_id)
        return handoff is not None and handoff.epoch == epoch

    def expire(self) -> None:
        """End the hand-offs whose deadline has passed."""
        now = self._clock()
        for request_id, handoff in list(self._handoffs.items()):
            if now > handoff.expires_at:
                self.drop(request_id, "deadline passed")

    def drop_all(self, abort: AbortAll) -> None:
        """End all hand-offs that the abort of a router's requests concerns."""
        for request_id in filter(abort.concerns, list(self._handoffs)):
            self.drop(request_id, "its prefill node lost its router")

    def settle(self, event: TransferEvent) -> bool:
        """Release an ended transfer's blocks; return whether its hand-off was open and failed."""
        draining = self._draining.pop((event.request_id, event.epoch), None)
        if draining is not None:
            self._ended[event.outcome] += 1
            self._engine.block_pool.release(draining.held_block_ids)
            return False
        handoff = self._handoffs.get(event.request_id)
        if handoff is None or handoff.epoch != event.epoch:
            return False
        del self._handoffs[event.request_id]
        self._ended[event.outcome] += 1
        self._engine.block_pool.release(handoff.held_block_ids)
        return event.kind is TransferEventKind.FAILED

    def views(self) -> list[RequestView]:
        """Return the open hand-offs for operators, also after token 1; safe from any thread."""
        now = self._clock()
        return [
            view_request(handoff.request, handoff.state, now - handoff.added_at)
            for handoff in list(self._handoffs.values())
        ]

    def metrics(self) -> HandoffMetrics:
        """Return counts of hand-offs; safe from any thread."""
        states = Counter(dict.fromkeys(("QUEUED", "STARTED", "PUSHING"), 0))
        states.update(handoff.state for handoff in list(self._handoffs.values()))
        states["DRAINING"] = len(self._draining)
        return HandoffMetrics(
            open=states,
            ended=self._ended.copy(),
            num_quarantined_blocks=self.num_draining_blocks,
        )

    @property
    def num_transfers(self) -> int:
        """Return the number of hand-offs that are open, or ended with writes in flight."""
        return len(self._handoffs) + len(self._draining)

    @property
    def num_draining_blocks(self) -> int:
        """Return how many blocks of ended hand-offs may still be read by writes in flight."""
        return sum(len(handoff.held_block_ids) for handoff in list(self._draining.values()))

    def held(self) -> list[BlockHolding]:
        """Return the blocks of open hand-offs, and blocks that writes may still read."""
        now = self._clock()
        pushed = (_holding(BlockOwner.PUSH, h, now) for h in self._handoffs.values())
        drained = (_holding(BlockOwner.DRAINING, h, now) for h in self._draining.values())
        return [*pushed, *drained]

    def _add_tail(self, handoff: _Handoff, tail: LayerTail) -> None:
        """Let a tail push the blocks that the last step of a prompt writes, layer by layer."""
        request = handoff.request
        # The tail leaves out blocks that the step in flight fills: they are pushed after that step.
        num_full = (request.num_computed_tokens + request.num_tokens_in_flight) // self._block_size
        first = max(handoff.num_blocks_pushed, bisect.bisect_left(handoff.places, num_full))
        handoff.tail, handoff.tail_first = tail, first
        tail.add_push(
            BlockPush(
                request_id=request.request_id,
                epoch=handoff.epoch,
                first_block=first,
                block_ids=tuple(handoff.block_ids[first:]),
            )
        )

    def _push(self, handoff: _Handoff, num_logical_blocks: int, token_id: int | None) -> None:
        """Push those blocks of the first ``num_logical_blocks`` that were not pushed before.

        Args:
            token_id: token 1, which makes this the last push; None: more pushes follow.
        """
        first = handoff.num_blocks_pushed
        num_blocks = bisect.bisect_left(handoff.places, num_logical_blocks * self._num_groups)
        if num_blocks <= first and token_id is None:
            return
        handoff.num_blocks_pushed = max(num_blocks, first)
        if token_id is not None and handoff.tail is not None and handoff.tail.is_complete:
            num_blocks = handoff.tail_first  # the tail has pushed the last blocks
        # Only the last push, with token 1, may have a block that is not full.
        num_tokens, record = num_logical_blocks * self._block_size, None
        if token_id is not None:
            num_tokens = handoff.request.num_computed_tokens
            record = HandoffRecord(
                num_tokens=num_tokens,
                token_id=token_id,
                draft_token_ids=self._engine.features.first_drafts(handoff.request),
                adapter=handoff.request.adapter,
            )
        self._sender.push(
            BlockPush(
                request_id=handoff.request.request_id,
                epoch=handoff.epoch,
                first_block=first,
                block_ids=tuple(handoff.block_ids[first:num_blocks]),
                num_tokens=num_tokens,
                record=record,
            )
        )
