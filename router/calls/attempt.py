"""Attempt: one try of a call, on two nodes or on a decode node alone. Knows no other attempts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec

from baton.api.images import without_files
from baton.api.outputs import PrefillReceipt, RequestDelta
from baton.link.words import (
    CancelCommand,
    DecodeCommand,
    NodeRole,
    PrefillCommand,
    RequestError,
)
from router.calls.call import AttemptTerms, Call
from router.calls.output_buffer import DeltaOrder, OutputBuffer
from router.fleet.node import LegDelta, LegWork, Node

# Nodes end a request themselves this many seconds after the router's deadline, in case the router
# did not cancel the request.
NODE_EXTRA_TIMEOUT_S = 5.0


class Attempt:
    """Runs one try of a call on its nodes, and puts the nodes' tokens in order into the buffer.

    A leg is one node's part of the attempt. Both legs are sent to their nodes at once. The attempt
    ends with the last token, an error, or `close`.

    Args:
        prefill: the prefill node; None if the decode node computes the prompt.
        decode: the decode node; None if the output ends with the token that the prefill node
            samples.
        buffer: receives the tokens; already holds the tokens of earlier attempts.

    Attributes:
        prefill_receipt: receipt of the prefill node; None before its first token.
        decoded: whether the buffer got tokens of the decode node.
        began: whether the buffer got this attempt's first token.
        began_at: when the buffer got this attempt's first token, by `time.perf_counter`; 0 before.
        start_index: output index of this attempt's first token.
        has_grammar: whether the decode node compiles a grammar.
    """

    def __init__(
        self,
        call: Call,
        prefill: Node | None,
        decode: Node | None,
        buffer: OutputBuffer,
        terms: AttemptTerms,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.epoch = terms.epoch
        self._supply = terms.supply  # what other nodes send for the prompt
        self.prefill_receipt: PrefillReceipt | None = None
        self.decoded = False
        self._request_id = call.scoped_id
        self._buffer = buffer
        self._order = DeltaOrder(len(buffer.token_ids), call.sampling_params.max_tokens)
        self.began = False
        self.began_at = 0.0
        self.start_index = len(buffer.token_ids)
        self.has_grammar = call.sampling_params.structured_output is not None
        self._kv_arrived = False
        self._finished_on: NodeRole | None = None
        self._closed = False
        self._send_legs(call, terms)

    @property
    def weights(self) -> str:
        """Version of the model weights on the attempt's nodes."""
        node = self.decode or self.prefill
        return "" if node is None else node.weights

    def _send_legs(self, call: Call, terms: AttemptTerms) -> None:
        output_token_ids, params = tuple(self._buffer.token_ids), call.sampling_params
        num_tokens = len(call.prompt_token_ids) + len(output_token_ids)
        num_cached = max(terms.num_cached_tokens, self._supply.num_fetched_tokens)
        num_uncomputed = max(num_tokens - num_cached, 1)
        if output_token_ids:  # an earlier attempt has delivered the prompt's logprobs
            params = dataclasses.replace(params, prompt_logprobs=None)
        for_both: dict[str, Any] = {
            "request_id": self._request_id,
            "epoch": self.epoch,
            "prompt_token_ids": call.prompt_token_ids,
            "sampling_params": params,
            "timeout_s": terms.timeout_s + NODE_EXTRA_TIMEOUT_S,
            "output_token_ids": output_token_ids,
            "cache_salt": call.cache_salt,
            "adapter": call.terms.adapter,
            "adapter_source": terms.adapter_source.folder,
            "pins_adapter": terms.adapter_source.is_pinned,
            "priority": call.terms.priority,
            "trace": terms.trace,
            "pins": call.terms.pins,
        }
        arrives_s, supply = 0.0, self._supply
        if self.prefill is not None:
            arrives_s = self.prefill.load.arrives_s(num_uncomputed, num_cached)
        if self.decode is not None:
            work = LegWork(
                num_tokens=len(call.prompt_token_ids) + params.max_tokens,
                num_uncomputed=0 if self.prefill else num_uncomputed,
                num_cached=num_cached,
                num_arriving=num_tokens,
                max_tokens=params.max_tokens - len(output_token_ids),
                timeout_s=terms.timeout_s,
                arrives_s=arrives_s,
                fetch_s=0.0 if self.prefill else supply.fetch_s,
            )
            self.decode.open_leg(self._request_id, self.epoch, self, work)
            peer = self.prefill.engine_id if self.prefill else ""
            images = without_files(call.images) if self.prefill else call.images
            fields = {**for_both, **supply.fetch_fields(self.decode)}
            self.decode.send(DecodeCommand(prefill_engine_id=peer, images=images, **fields))
        if self.prefill is not None:
            work = LegWork.of_prompt(num_uncomputed, num_cached, supply.fetch_s, call.pooling)
            self.prefill.open_leg(self._request_id, self.epoch, self, work)
            peer = self.decode.engine_id if self.decode else ""
            self.prefill.send(
                PrefillCommand(
                    decode_engine_id=peer,
                    images=call.images,
                    pooling=call.pooling,
                    **supply.encode_fields,
                    **supply.fetch_fields(self.prefill),
                    **for_both,
                )
            )
        supply.send_commands(for_both["timeout_s"])

    @property
    def nodes(self) -> list[Node]:
        """The one or two nodes of this attempt."""
        return [node for node in (self.prefill, self.decode) if node is not None]

    @property
    def num_tokens(self) -> int:
        """Number of output tokens that this attempt has added to the buffer."""
        return len(self._buffer.token_ids) - self.start_index

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        """Handle one token that a node sent without logprobs or receipt.

        Fast for the most frequent token: the decode node's next one.
        """
        if self.decoded and role is NodeRole.DECODE and self._order.push_next(output_index):
            self._buffer.add_token(token_id)
            return
        delta = RequestDelta(self._request_id, output_index, (token_id,), epoch=self.epoch)
        self.on_leg_delta(LegDelta(role, delta))

    def on_leg_delta(self, item: LegDelta) -> None:
        """Handle a delta of either leg; put all tokens that are next in order into the buffer."""
        if item.delta.error is not None:
            if not self._is_harmless(item):
                self.fail(item)
            return
        if not self._order.admits(item):
            problem = f"{item.role.value}: said tokens that nobody asked for"
            error = RequestError("INTERNAL", problem)
            self.fail(LegDelta(item.role, msgspec.structs.replace(item.delta, error=error)))
            return
        self._kv_arrived |= item.role is NodeRole.DECODE
        for ready in self._order.push(item):
            self._note_forwarded(ready)
            self._buffer.add_delta(ready.delta)
            if self._finished_on is not None:
                self.close()
                return

    def fail(self, item: LegDelta) -> None:
        """End the attempt with an error, unless it has already ended."""
        if not self._closed:
            self.close()
            self._buffer.fail(item)

    def _is_harmless(self, item: LegDelta) -> bool:
        """Return whether an error comes from a prefill node that is no longer needed.

        Once token 1 is passed on, the prefill node is needed only until its KV has arrived on the
        decode node. If the prefill node is lost before, its error is harmless, too: the decode node
        itself reports missing KV.
        """
        if item.role is not NodeRole.PREFILL or not self.began:
            return False
        return self._kv_arrived or item.node_lost

    def _note_forwarded(self, item: LegDelta) -> None:
        """Update the attempt's state for a delta that the buffer is about to get."""
        if self.prefill is not None:
            self._note_forwarded_by_pair(self.prefill, item)
        elif item.delta.decode is not None:
            self._supply.note_decoded(item.delta.decode)
        if not self.began:
            self.began, self.began_at = True, time.perf_counter()
        self.decoded |= item.role is NodeRole.DECODE
        if item.delta.finish_reason is not None:
            self._finished_on = item.role

    def _note_forwarded_by_pair(self, prefill: Node, item: LegDelta) -> None:
        """Update the prefill leg for a delta that the buffer is about to get.

        Cancels the leg if the decode node was faster, takes the prompt off the node's load once
        token 1 is sampled, and closes the leg once the KV has arrived.
        """
        if not self.began and item.role is NodeRole.DECODE:
            # The decode node computed the prompt itself, because its prefix cache had nearly all of
            # it.
            prefill.send(CancelCommand(self._request_id, self.epoch))
        if item.delta.prefill is not None:
            self.prefill_receipt = item.delta.prefill
            prefill.relieve_leg(self.epoch)
            self._supply.note_computed(item.delta.prefill)
        if self._kv_arrived:  # the prefill node's work for this attempt is done
            prefill.close_leg(self.epoch)

    def close(self) -> None:
        """Close both legs, and cancel the call on nodes that may still work on it.

        Safe to repeat.
        """
        if self._closed:
            return
        self._closed = True
        self._supply.end()
        for node in self.nodes:
            node.close_leg(self.epoch)
            # Nodes need no cancellation after the decode node's last token: both have finished the
            # call.
            if self._finished_on is not NodeRole.DECODE:
                node.send(CancelCommand(self._request_id, self.epoch))
