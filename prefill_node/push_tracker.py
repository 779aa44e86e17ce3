"""PushTracker: which blocks of which request may travel, and who still holds them.

Takes what a step will compute and what it computed, gives pushes to the sender. Holds one
reference on every block of a request from the moment it is about to be filled until the
transfer's end event, so that the request itself may finish or be aborted at any time.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.api.outputs import RequestDelta
from baton.kv_manifest import KVOrder
from baton.limits import NUM_LAYER_GROUPS
from baton.link.words import AbortAll, RequestView
from baton.telemetry.ledger import BlockHolding, BlockOwner
from baton.telemetry.node_metrics import HandoffMetrics, TransferOutcome
from engine.core.outputs import ScheduledRequest, SchedulerOutput
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import BlockPush, HandoffRecord, TransferEvent, TransferEventKind
from kvconnector.blocks import layer_groups
from kvconnector.ends import Sender
from node_runtime.request_view import view_request
from prefill_node.layer_tail import LayerTail
from prefill_node.options import PushMode


@dataclass(slots=True)
class _Handoff:
    """One request on its way to a decode node.

    ``indices`` are the places in the request's blocks of those that travel; ``block_ids`` are the
    blocks that are there now; ``held_block_ids`` also those of before a preemption, which may still
    be travelling. ``tail`` pushes, some layers at a time, the blocks from ``tail_first`` on.
    """

    request: Request
    indices: list[int]
    epoch: int
    engine_id: str
    added_at: float
    expires_at: float
    started: bool = False
    block_ids: list[int] = field(default_factory=list)
    held_block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_blocks_pushed: int = 0
    tail: LayerTail | None = None
    tail_first: int = 0

    @property
    def state(self) -> str:
        """Name of the state, for operators."""
        if not self.started:
            return "QUEUED"
        return "PUSHING" if self.num_blocks_pushed else "STARTED"


def _ends_prompt(item: ScheduledRequest) -> bool:
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
    """The handoffs of one prefill node.

    Args:
        engine: where the blocks and their references are.
        sender: where pushes go.
        mode: when blocks are pushed.
        num_layer_groups: in how many parts the last chunk goes, at most. In a model with several
            KV cache groups it goes whole, with token 1: their layers do not end in the order of
            their blocks. Where blocks lie by heads, whole, with the last layer.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        mode: PushMode = PushMode.LAYERS,
        num_layer_groups: int = NUM_LAYER_GROUPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._sender = sender
        self._mode = mode
        self._layer_groups = layer_groups(engine.kv_memory.layers_per_group, num_layer_groups)
        memory = engine.kv_memory
        num_layers = len(memory.spec.groups[0].layers)
        can_cut = memory.layers_per_group == num_layers
        is_by_heads = memory.manifest.groups[0].order is KVOrder.HEADS
        # Blocks that lie by heads go whole, but with the last layer: before anything is sampled.
        self._num_layers = None if can_cut else num_layers
        has_tail = memory.spec.num_groups == 1 and (can_cut or is_by_heads)
        self._has_tail = mode is PushMode.LAYERS and has_tail
        self._block_size = engine.kv_memory.spec.block_size
        self._num_groups = engine.kv_memory.spec.num_groups
        self._handoffs: dict[str, _Handoff] = {}
        # Ended on our side, not yet quiet on the wire; by (request_id, epoch).
        self._draining: dict[tuple[str, int], _Handoff] = {}
        self._ended: Counter[TransferOutcome] = Counter()

    def add(self, request: Request, epoch: int, engine_id: str, timeout_s: float) -> None:
        """Hand this request over to a decode node when it is computed.

        An older attempt whose push is still open ends; its blocks stay held until it is quiet.
        """
        self.drop(request.request_id, "")
        now = self._clock()
        self._handoffs[request.request_id] = _Handoff(
            request,
            self._engine.handoff_indices(request.num_initial_tokens),
            epoch,
            engine_id,
            added_at=now,
            expires_at=now + timeout_s,
        )

    def before_step(self, scheduled: SchedulerOutput) -> Callable[[int], None] | None:
        """Ask for a grant when a request's first chunk begins; take references.

        Returns:
            What is to be called after each layer of the step, if anything.
        """
        tail: LayerTail | None = None
        for item in scheduled.scheduled:
            handoff = self._handoffs.get(item.request.request_id)
            if handoff is None:
                continue
            request = handoff.request
            is_first = not handoff.started
            if is_first:
                handoff.started = True
                self._sender.start(
                    request.request_id,
                    handoff.epoch,
                    handoff.engine_id,
                    num_tokens=request.num_initial_tokens,
                    num_blocks=len(handoff.indices),
                    groups=[index % self._num_groups for index in handoff.indices]
                    if self._num_groups > 1
                    else (),
                )
            if request.num_preemptions != handoff.num_preemptions:  # computed anew elsewhere
                handoff.num_preemptions = request.num_preemptions
                handoff.block_ids.clear()
            # What travels does not slide out before the prompt's end: it is not the null block.
            first, end = len(handoff.block_ids), len(request.block_ids)
            new_indices = handoff.indices[first : bisect.bisect_left(handoff.indices, end)]
            new_block_ids = [request.block_ids[index] for index in new_indices]
            self._engine.block_pool.hold(new_block_ids)
            handoff.block_ids += new_block_ids
            handoff.held_block_ids += new_block_ids
            if is_first and self._mode is not PushMode.AFTER_PREFILL:  # its cached prefix
                self._push(handoff, request.num_computed_tokens // self._block_size, None)
            if self._has_tail and _ends_prompt(item):
                tail = tail or LayerTail(
                    *(self._sender, self._layer_groups, self._engine.kv_memory.fence),
                    self._num_layers,
                )
                self._add_tail(handoff, tail)
        return None if tail is None else tail.after_layer

    def after_step(self, scheduled: SchedulerOutput, outputs: Mapping[str, RequestDelta]) -> None:
        """Push the blocks that became full; with token 1, the rest.

        Args:
            outputs: of this step by request id, those with which a request ends left out.
        """
        for item in scheduled.scheduled:
            handoff = self._handoffs.get(item.request.request_id)
            if handoff is None:
                continue
            output = outputs.get(item.request.request_id)
            num_tokens = handoff.request.num_computed_tokens
            if output is None and self._mode is PushMode.AFTER_PREFILL:
                continue
            if output is None:  # full blocks only: the last one is still being filled
                self._push(handoff, num_tokens // self._block_size, None)
            else:
                self._push(handoff, -(-num_tokens // self._block_size), output.token_ids[0])

    def drop(self, request_id: str, reason: str, epoch: int | None = None) -> None:
        """End a handoff early; harmless when there is none.

        Args:
            epoch: only if it is this attempt's.
            reason: for the decode node's client; empty when nobody waits for it there.
        """
        handoff = self._handoffs.get(request_id)
        if handoff is None or epoch not in (None, handoff.epoch):
            return
        del self._handoffs[request_id]
        if not handoff.started:
            self._engine.block_pool.release(handoff.held_block_ids)
            return
        self._draining[request_id, handoff.epoch] = handoff
        self._sender.abort(request_id, handoff.epoch, reason)

    def has(self, request_id: str, epoch: int) -> bool:
        """Whether a handoff is open."""
        handoff = self._handoffs.get(request_id)
        return handoff is not None and handoff.epoch == epoch

    def expire(self) -> None:
        """End the handoffs whose time is up: their grant or their writes never came."""
        now = self._clock()
        for request_id, handoff in list(self._handoffs.items()):
            if now > handoff.expires_at:
                self.drop(request_id, "deadline passed")

    def drop_all(self, abort: AbortAll) -> None:
        """End every handoff of a router early."""
        for request_id in filter(abort.concerns, list(self._handoffs)):
            self.drop(request_id, "its prefill node lost its router")

    def settle(self, event: TransferEvent) -> bool:
        """Drop the references of a transfer that ended.

        Returns:
            Whether a handoff that was still wanted failed.
        """
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
        """Open handoffs, also of requests that are computed already; from any thread."""
        now = self._clock()
        return [
            view_request(handoff.request, handoff.state, now - handoff.added_at)
            for handoff in list(self._handoffs.values())
        ]

    def metrics(self) -> HandoffMetrics:
        """From any thread."""
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
        """Handoffs that are open, or ended and still on the wire."""
        return len(self._handoffs) + len(self._draining)

    @property
    def num_draining_blocks(self) -> int:
        """Blocks of ended requests that are still on the wire."""
        return sum(len(handoff.held_block_ids) for handoff in list(self._draining.values()))

    def held(self) -> list[BlockHolding]:
        """Blocks that travel, or may still be read by a write; for the ledger."""
        now = self._clock()
        pushed = (_holding(BlockOwner.PUSH, h, now) for h in self._handoffs.values())
        drained = (_holding(BlockOwner.DRAINING, h, now) for h in self._draining.values())
        return [*pushed, *drained]

    def _add_tail(self, handoff: _Handoff, tail: LayerTail) -> None:
        """Have the blocks that this step, the prompt's last, writes pushed while it computes."""
        request = handoff.request
        # Of a step in flight nothing is pushed yet: what it fills is not the tail's.
        num_full = (request.num_computed_tokens + request.num_tokens_in_flight) // self._block_size
        first = max(handoff.num_blocks_pushed, bisect.bisect_left(handoff.indices, num_full))
        handoff.tail, handoff.tail_first = tail, first
        tail.add(
            BlockPush(
                request_id=request.request_id,
                epoch=handoff.epoch,
                first_block=first,
                block_ids=tuple(handoff.block_ids[first:]),
            )
        )

    def _push(self, handoff: _Handoff, num_logical_blocks: int, token_id: int | None) -> None:
        first = handoff.num_blocks_pushed
        num_blocks = bisect.bisect_left(handoff.indices, num_logical_blocks * self._num_groups)
        if num_blocks <= first and token_id is None:
            return
        handoff.num_blocks_pushed = max(num_blocks, first)
        if token_id is not None and handoff.tail is not None and handoff.tail.is_complete:
            num_blocks = handoff.tail_first  # the rest went with the tail
        # What is in a block that is not full yet stays here until the last one.
        num_tokens, record = num_logical_blocks * self._block_size, None
        if token_id is not None:
            num_tokens = handoff.request.num_computed_tokens
            record = HandoffRecord(
                num_tokens=num_tokens,
                token_id=token_id,
                draft_token_ids=self._engine.first_drafts(handoff.request),
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
