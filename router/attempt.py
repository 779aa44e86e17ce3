"""Attempt: one try of a call on one pair of nodes. Knows its two legs and no other tries."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from baton.link import CancelCommand, DecodeCommand, NodeRole, PrefillCommand
from baton.outputs import PrefillReceipt
from router.call import Call
from router.delta_order import DeltaOrder
from router.node_pool import LegDelta, Node

# A node gives up on a request this long after the router would have: a last safety net.
NODE_EXTRA_TIMEOUT_S = 5.0


class Attempt:
    """Both legs are sent at once; `close` ends them.

    Args:
        output_token_ids: what earlier attempts forwarded to the client.
        decode: None when the next token is the last.
        epoch: tells this attempt's deltas from all others'.
        timeout_s: until the call's deadline.
        inbox: takes what the nodes say.

    Attributes:
        order: of what is to be forwarded.
        prefill_receipt: None while (or because) the first token did not come from there.
        decoded: tokens of the decode node were forwarded.
    """

    def __init__(
        self,
        call: Call,
        output_token_ids: Sequence[int],
        prefill: Node,
        decode: Node | None,
        *,
        epoch: int,
        timeout_s: float,
        inbox: asyncio.Queue[LegDelta],
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.epoch = epoch
        self.order = DeltaOrder(len(output_token_ids))
        self.prefill_receipt: PrefillReceipt | None = None
        self.decoded = False
        self._request_id = call.request_id
        self._began = False  # its first token was forwarded
        self._kv_arrived = False
        self._finished_on: NodeRole | None = None
        self._closed = False
        self._send_legs(call, tuple(output_token_ids), timeout_s + NODE_EXTRA_TIMEOUT_S, inbox)

    def _send_legs(
        self,
        call: Call,
        output_token_ids: tuple[int, ...],
        timeout_s: float,
        inbox: asyncio.Queue[LegDelta],
    ) -> None:
        num_prompt_tokens = len(call.prompt_token_ids)
        params = call.sampling_params
        if output_token_ids:  # the client has them
            params = dataclasses.replace(params, prompt_logprobs=None)
        if self.decode is not None:
            num_tokens = num_prompt_tokens + params.max_tokens
            self.decode.open_leg(call.request_id, self.epoch, num_tokens, inbox)
            self.decode.send(
                DecodeCommand(
                    request_id=call.request_id,
                    epoch=self.epoch,
                    prompt_token_ids=call.prompt_token_ids,
                    sampling_params=params,
                    prefill_engine_id=self.prefill.engine_id,
                    timeout_s=timeout_s,
                    output_token_ids=output_token_ids,
                )
            )
        num_tokens = num_prompt_tokens + len(output_token_ids)
        self.prefill.open_leg(call.request_id, self.epoch, num_tokens, inbox)
        self.prefill.send(
            PrefillCommand(
                request_id=call.request_id,
                epoch=self.epoch,
                prompt_token_ids=call.prompt_token_ids,
                sampling_params=params,
                decode_engine_id=self.decode.engine_id if self.decode else "",
                timeout_s=timeout_s,
                output_token_ids=output_token_ids,
            )
        )

    def survives(self, item: LegDelta) -> bool:
        """Whether an error does not hurt: it is the prefill node's, and its part is done.

        After its token, what a prefill node says of its push still matters. That it went away does
        not: if the KV had not arrived, the decode node will say so.
        """
        if item.role is not NodeRole.PREFILL or not self._began:
            return False
        return self._kv_arrived or item.node_lost

    def note_arrival(self, item: LegDelta) -> None:
        """A delta without an error came, in whatever order."""
        self._kv_arrived |= item.role is NodeRole.DECODE

    def note_forwarded(self, item: LegDelta) -> None:
        """A delta is about to be forwarded."""
        if not self._began and item.role is NodeRole.DECODE:
            # It had (nearly) all in its cache and computed the rest itself.
            self.prefill.send(CancelCommand(self._request_id, self.epoch))
        if item.delta.prefill is not None:
            self.prefill_receipt = item.delta.prefill
            self.prefill.relieve_leg(self._request_id, self.epoch)
        self._began = True
        self.decoded |= item.role is NodeRole.DECODE
        if self._kv_arrived:  # the prefill node has no more to say
            self.prefill.close_leg(self._request_id, self.epoch)
        if item.delta.output.finish_reason is not None:
            self._finished_on = item.role

    def close(self) -> None:
        """Forget both legs; on nodes that may still work on the call, cancel it. Once is enough."""
        if self._closed:
            return
        self._closed = True
        for node in (self.prefill, self.decode):
            if node is None:
                continue
            node.close_leg(self._request_id, self.epoch)
            # What ended on the decode node ended on both; else either may still be at work.
            if self._finished_on is not NodeRole.DECODE:
                node.send(CancelCommand(self._request_id, self.epoch))
