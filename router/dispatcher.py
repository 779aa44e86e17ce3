"""Dispatcher: one request's life. Picks a pair, sends both legs at once, forwards by index."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from baton.errors import (
    BatonError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    NodeUnavailableError,
    OverloadedError,
    RequestCancelledError,
)
from baton.link import (
    CancelCommand,
    DecodeCommand,
    NodeRole,
    PrefillCommand,
    RequestDelta,
    RequestError,
)
from baton.outputs import DecodeReceipt, PrefillReceipt, Receipt, RequestOutput
from baton.sampling_params import SamplingParams
from router.node_pool import LegDelta, Node, NodePool
from router.policies.base import RouteQuery, RoutingPolicy

# A node gives up on a request this long after the router would have: a last safety net.
NODE_EXTRA_TIMEOUT_S = 5.0
# Of a request whose token 1 the decode node sampled, for it had nearly all of the prompt.
NO_PREFILL = PrefillReceipt(
    queue_s=0.0, prefill_s=0.0, num_chunks=0, num_computed_tokens=0, num_cached_tokens=0
)

_ERRORS: dict[str, type[BatonError]] = {
    "UNAVAILABLE": NodeUnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "CANCELLED": RequestCancelledError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request.

    Attributes:
        sampling_params: with a seed.
        received_at: when it reached the router, by `time.perf_counter`.
        timeout_s: from now.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    sampling_params: SamplingParams
    received_at: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CallOutput:
    """New tokens, strictly in order; the last one carries the receipt."""

    output: RequestOutput
    receipt: Receipt | None = None


class Dispatcher:
    """Runs calls over the nodes of a pool.

    Args:
        pool: where nodes and their links are.
        policy: picks the pair.
    """

    def __init__(self, pool: NodePool, policy: RoutingPolicy) -> None:
        self._pool = pool
        self._policy = policy
        self._open: dict[str, _Attempt] = {}
        # Never the same twice, also after a restart: a client may use its request id again while
        # nodes still clear up after the first time, and only the epoch tells the two apart.
        self._epochs = itertools.count(secrets.randbits(31))

    @property
    def num_open(self) -> int:
        """Requests in progress."""
        return len(self._open)

    async def run(self, call: Call) -> AsyncGenerator[CallOutput, None]:
        """Stream a call's tokens; ending the iteration early cancels it on both nodes.

        Raises:
            NodeUnavailableError: there is no pair, or a node went away.
            DeadlineExceededError: the time is up.
        """
        if call.request_id in self._open:
            raise InvalidRequestError("request_id", f"{call.request_id!r} is in use")
        attempt = self._open[call.request_id] = self._begin(call)
        try:
            async with contextlib.aclosing(attempt.outputs()) as outputs:
                async for output in outputs:
                    yield output
        finally:
            attempt.close()
            del self._open[call.request_id]

    def receipt(self, request_id: str) -> Receipt:
        """The receipt of an open call as of now, for who is about to end it; after token 1."""
        return self._open[request_id].receipt(None)

    def _begin(self, call: Call) -> _Attempt:
        pairs = self._pool.pairs()
        if not pairs:
            raise NodeUnavailableError(self._pool.why_no_pair())
        num_prompt_tokens = len(call.prompt_token_ids)
        max_tokens = call.sampling_params.max_tokens
        pair = self._policy.pick(
            RouteQuery(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens), pairs
        )
        prefill = self._pool.node(pair.prefill.engine_id)
        decode = self._pool.node(pair.decode.engine_id)
        assert prefill is not None
        assert decode is not None
        # Token 1 is sampled by the prefill node: when there is no token 2, nobody else is asked.
        ends_with_token_1 = max_tokens == 1 or num_prompt_tokens + 1 >= self._pool.max_model_len
        return _Attempt(
            call, prefill, None if ends_with_token_1 else decode, epoch=next(self._epochs)
        )


class _Attempt:
    """One try of a call on one pair of nodes."""

    def __init__(self, call: Call, prefill: Node, decode: Node | None, *, epoch: int) -> None:
        self._call = call
        self._prefill = prefill
        self._decode = decode
        self._epoch = epoch
        self._finished_on: NodeRole | None = None
        self._prefill_receipt: PrefillReceipt | None = None
        self._kv_arrived = False
        self._num_output_tokens = 0
        self._decoded = False  # tokens of the decode node were forwarded
        self._ttft_s = 0.0
        self._inbox: asyncio.Queue[LegDelta] = asyncio.Queue()
        self._deadline = asyncio.get_running_loop().call_later(call.timeout_s, self._time_out)
        self._send_legs()

    def _send_legs(self) -> None:
        call, num_prompt_tokens = self._call, len(self._call.prompt_token_ids)
        timeout_s = call.timeout_s + NODE_EXTRA_TIMEOUT_S
        if self._decode is not None:
            num_tokens = num_prompt_tokens + call.sampling_params.max_tokens
            self._decode.open_leg(call.request_id, self._epoch, num_tokens, self._inbox)
            self._decode.send(
                DecodeCommand(
                    request_id=call.request_id,
                    epoch=self._epoch,
                    prompt_token_ids=call.prompt_token_ids,
                    sampling_params=call.sampling_params,
                    prefill_engine_id=self._prefill.engine_id,
                    timeout_s=timeout_s,
                )
            )
        self._prefill.open_leg(call.request_id, self._epoch, num_prompt_tokens, self._inbox)
        self._prefill.send(
            PrefillCommand(
                request_id=call.request_id,
                epoch=self._epoch,
                prompt_token_ids=call.prompt_token_ids,
                sampling_params=call.sampling_params,
                decode_engine_id=self._decode.engine_id if self._decode else "",
                timeout_s=timeout_s,
            )
        )

    async def outputs(self) -> AsyncGenerator[CallOutput, None]:
        """Deltas of both legs, strictly by output index."""
        early: dict[int, LegDelta] = {}  # token 2 may overtake token 1: they take other ways
        while True:
            item = await self._inbox.get()
            if item.delta.error is not None:
                # After token 1, what a prefill node says of its push still matters. That it went
                # away does not: if the KV had not arrived, the decode node will say so.
                if item.node_lost and item.role is NodeRole.PREFILL and self._prefill_receipt:
                    continue
                raise _error(item.delta.error)
            self._kv_arrived |= item.role is NodeRole.DECODE
            early.setdefault(item.delta.output.output_index, item)
            while (ready := early.pop(self._num_output_tokens, None)) is not None:
                delta = ready.delta
                self._num_output_tokens += len(delta.output.token_ids)
                self._decoded |= ready.role is NodeRole.DECODE
                self._note(delta)
                if delta.output.finish_reason is not None:
                    self._finished_on = ready.role
                    yield CallOutput(delta.output, self.receipt(delta.decode))
                    return
                yield CallOutput(delta.output)

    def receipt(self, decode: DecodeReceipt | None) -> Receipt:
        """What the call cost up to now; ``decode``: the decode node's part, with its last token."""
        return Receipt(
            num_prompt_tokens=len(self._call.prompt_token_ids),
            num_output_tokens=self._num_output_tokens,
            ttft_s=self._ttft_s,
            total_s=time.perf_counter() - self._call.received_at,
            prefill_node=self._prefill.name,
            decode_node=self._decode.name if self._decode and self._decoded else "",
            prefill=self._prefill_receipt or NO_PREFILL,
            decode=decode,
        )

    def close(self) -> None:
        """Forget both legs; on nodes that may still work on the call, cancel it."""
        self._deadline.cancel()
        for node in (self._prefill, self._decode):
            if node is None:
                continue
            node.close_leg(self._call.request_id, self._epoch)
            # What ended on the decode node ended on both; else either may still be at work.
            if self._finished_on is not NodeRole.DECODE or self._prefill_receipt is None:
                node.send(CancelCommand(self._call.request_id, self._epoch))

    def _note(self, delta: RequestDelta) -> None:
        if not self._ttft_s:
            self._ttft_s = time.perf_counter() - self._call.received_at
        if delta.prefill is not None:
            self._prefill_receipt = delta.prefill
            self._prefill.relieve_leg(self._call.request_id, self._epoch)
        if self._prefill_receipt is not None and self._kv_arrived:  # it has no more to say
            self._prefill.close_leg(self._call.request_id, self._epoch)

    def _time_out(self) -> None:
        error = RequestError("DEADLINE_EXCEEDED", "the request's deadline passed")
        output = RequestOutput(self._call.request_id, 0, ())
        delta = RequestDelta(output, self._epoch, error=error)
        self._inbox.put_nowait(LegDelta(NodeRole.DECODE, delta))  # the leg that ends the call


def _error(error: RequestError) -> BatonError:
    if error.code == "INVALID_ARGUMENT":
        field_name, _, problem = error.message.partition(": ")
        return InvalidRequestError(field_name, problem)
    return _ERRORS.get(error.code, EngineDeadError)(error.message)
