"""Outputs of a request: the deltas while it runs, the finished completion, and the receipt.

Imports neither torch nor protobuf, so engine, nodes, router and client can all use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec


class FinishReason(Enum):
    """Reasons for which an output ends."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of a token in a prompt or output, and of the most probable tokens in its place.

    Logprobs are natural logarithms of the model's own distribution, before penalties, biases, bans,
    temperature and filters.

    Attributes:
        logprob: logprob of the token itself.
        top: the most probable tokens, best first, as (token id, logprob); as many as requested. May
            lack the token itself.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReceipt:
    """The cost of a request on its prefill node; durations in seconds, by the node's clock.

    Attributes:
        queue_s: command received -> first chunk scheduled.
        prefill_s: first chunk scheduled -> token 1 sampled.
        send_s: token 1 sampled -> handed to the link to the router; 0: not sent yet, or the node
            has an older version of Baton.
        num_encodings_received: images whose encodings encode nodes sent.
        num_encodings_lost: images that encode nodes failed to encode in time, so that this node
            encoded them.
        encodings_wait_s: command received -> last encoding received or lost; a part of ``queue_s``.
        lost_images: indexes in the prompt of the images that ``num_encodings_lost`` counts.
        pixels_wait_s: image files to decode -> pixel values made; a part of ``queue_s``.
        num_images_encoded: images that this node encoded.
        num_encodings_cached: images whose encodings were in this node's encoder cache.
        encoder_s: time in the image encoder during the steps that computed the prompt, for images
            of any prompt; a part of ``prefill_s``.
        num_fetched_tokens: tokens of a cached prefix that another node sent; a part of
            ``num_cached_tokens``.
        num_fetches_lost: 1 if another node was to send a cached prefix that did not come, else 0.
        fetch_wait_s: wait began -> prefix received or lost; a part of ``queue_s``. 0: no
            prefix was expected.
        num_pinned_tokens: prompt tokens that the request pinned in this node's prefix cache.
    """

    queue_s: float
    prefill_s: float
    num_chunks: int
    num_computed_tokens: int
    num_cached_tokens: int
    send_s: float = 0.0
    num_encodings_received: int = 0
    num_encodings_lost: int = 0
    encodings_wait_s: float = 0.0
    pixels_wait_s: float = 0.0
    num_images_encoded: int = 0
    num_encodings_cached: int = 0
    encoder_s: float = 0.0
    lost_images: tuple[int, ...] = ()
    num_fetched_tokens: int = 0
    num_fetches_lost: int = 0
    fetch_wait_s: float = 0.0
    num_pinned_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReceipt:
    """The cost of sending a request's KV blocks; a part of the commit record.

    Attributes:
        num_descriptors: memory ranges that were written, after merging adjacent ones.
        posting_s: seconds in calls that post writes; within one host, these calls copy the bytes.
    """

    num_bytes: int
    num_blocks: int
    transport: str
    exposed_transfer_s: float
    num_descriptors: int = 0
    posting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReceipt:
    """The cost of a request on its decode node; durations in seconds, by the node's clock.

    Attributes:
        num_cached_tokens: prompt tokens whose KV was in the node's own prefix cache, so that it was
            not sent.
        num_drafts: draft tokens that the node checked in its steps.
        num_accepted_drafts: draft tokens that became part of the output.
        why_drafts: why the last step had its number of draft tokens, in words; empty if no number
            was chosen.
        num_pinned_tokens: prompt tokens that the request pinned in this node's prefix cache.
        num_fetched_tokens, num_fetches_lost: as in `PrefillReceipt`, if this node computed the
            prompt.
        fetch_wait_s: as in `PrefillReceipt`, if this node computed the prompt; a part of
            ``parked_s``.
    """

    parked_s: float
    first_step_s: float
    steps_until_first: int
    num_prompt_tokens_computed: int
    num_forwards: int
    num_preemptions: int
    push: PushReceipt
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    why_drafts: str = ""
    num_pinned_tokens: int = 0
    num_fetched_tokens: int = 0
    num_fetches_lost: int = 0
    fetch_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request failed on a node.

    Attributes:
        code: name of a gRPC status code; or ``PREEMPTED`` if the decode node ran out of memory and
            gave the request back. The router then starts another attempt, which continues after the
            tokens so far.
    """

    code: str
    message: str


class RequestDelta(msgspec.Struct, frozen=True, gc=False):
    """Tokens and facts that one step added to a request's output.

    The scheduler sends deltas to the router.

    Almost every output token makes a delta, so deltas are msgspec structs: making a frozen
    dataclass takes ten times as long.

    Attributes:
        output_index: position of ``token_ids[0]`` in the output, by which the router drops
            duplicates.
        logprobs: one per token; empty if not requested.
        prompt_logprobs: one per prompt token, sent with the first output token if requested. The
            first is None.
        epoch: number of the attempt of the request at the router.
        prefill: receipt of the prefill node, sent with its token.
        decode: receipt of the decode node, sent with the last token.
        error: why the request failed on this node.
        sampled_at: when token 1 was sampled on the prefill node, by `time.monotonic`.
        pooled: result of a pooled request, little-endian float32; a delta with a result has no
            tokens.
    """

    request_id: str
    output_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    epoch: int = 0
    prefill: PrefillReceipt | None = None
    decode: DecodeReceipt | None = None
    error: RequestError | None = None
    sampled_at: float = 0.0
    pooled: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The latency receipt of a finished request.

    Attributes:
        ttft_s: seconds from the request's arrival at the router until token 1 is handed to the
            client's stream.
        total_s: seconds from the request's arrival at the router until the last token.
        num_output_tokens: tokens that the client received; a node may have computed more.
        prefill_node: name of the prefill node of the last attempt.
        decode_node: name of the decode node of the last attempt; empty if the request ended with
            the prefill node's token.
        prefill: the prefill node's receipt; None if the decode node had nearly all of the prompt
            in its cache and computed the rest itself.
        decode: the decode node's receipt; None if the request ended with the prefill node's token
            or at a stop string. The router finds stop strings and aborts the decode node, which
            then does not send any receipt.
        num_attempts: number of attempts; above 1 if nodes were lost, could not reach each other, or
            ran out of memory.
        router_queue_s: request received -> sent to the nodes of the attempt that gave token 1.
        accept_s: request received -> checked and tokenized; the first part of ``router_queue_s``.
        delivery_s: token 1 read from a node's link -> handed to the client's stream.
        model: name that the request was served under; empty: from an older router.
        adapter: digest of the LoRA adapter that the name stood for; empty: the base model.
        num_images: number of images in the prompt.
        num_image_tokens: prompt tokens of the images, marks included.
        weights: version of the nodes' weights (a digest); empty: from an older router.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    total_s: float
    prefill_node: str
    decode_node: str
    prefill: PrefillReceipt | None
    decode: DecodeReceipt | None
    num_attempts: int = 1
    router_queue_s: float = 0.0
    accept_s: float = 0.0
    delivery_s: float = 0.0
    model: str = ""
    adapter: str = ""
    num_images: int = 0
    num_image_tokens: int = 0
    weights: str = ""

    @property
    def network_s(self) -> float:
        """Seconds on the links to the prefill node and back, including waits for event loops.

        The value is the sum of both directions, because clocks of two machines are not compared. If
        the decode node computed the prompt alone, its computing time is included.
        """
        prefill = self.prefill
        on_node_s = prefill.queue_s + prefill.prefill_s + prefill.send_s if prefill else 0.0
        return self.ttft_s - self.router_queue_s - on_node_s - self.delivery_s

    @property
    def ttft_parts(self) -> dict[str, float]:
        """The parts of the time to token 1, in seconds, by name, in the order in which they occur.

        The parts sum to ``ttft_s``, unless another attempt followed the attempt that gave token 1.
        """
        prefill = self.prefill
        on_nodes = {"decode_prompt_s": self.network_s}
        if prefill is not None:
            on_nodes = {
                "prefill_queue_s": prefill.queue_s,
                "prefill_s": prefill.prefill_s,
                "send_s": prefill.send_s,
                "network_s": self.network_s,
            }
        return {
            "accept_s": self.accept_s,
            "place_s": self.router_queue_s - self.accept_s,
            **on_nodes,
            "delivery_s": self.delivery_s,
        }

    @property
    def handoff_s(self) -> float | None:
        """Seconds from sampling token 1 until the decode node has its KV; None: no hand-off.

        The clocks of two nodes are compared by assuming that both received their commands at the
        same time.
        """
        if self.prefill is None or self.decode is None:
            return None
        return max(self.decode.parked_s - self.prefill.queue_s - self.prefill.prefill_s, 0.0)

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds per token after the first; 0 if there is only one token."""
        after_first = self.num_output_tokens - 1
        return (self.total_s - self.ttft_s) / after_first if after_first > 0 else 0.0

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that the node which computed the prompt had in its cache."""
        computed_by = self.prefill or self.decode
        if computed_by is None:
            return 0
        # A later attempt computes the output so far with the prompt, and may find its tokens in the
        # cache, too.
        return min(computed_by.num_cached_tokens, self.num_prompt_tokens)

    @property
    def num_pinned_tokens(self) -> int:
        """Number of prompt tokens that the node which computed the prompt has pinned."""
        computed_by = self.prefill or self.decode
        found = 0 if computed_by is None else computed_by.num_pinned_tokens
        return min(found, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """The cost of a request in an engine without a router; times in seconds.

    Attributes:
        queue_s: time from the request's arrival until it was first scheduled.
        ttft_s: time from arrival until the first token.
        total_s: time from arrival until the last token.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_preemptions: how often the request lost its blocks and was recomputed.
        num_drafts: draft tokens that were checked.
        num_accepted_drafts: draft tokens that became part of the output.
        weights: version of the weights that computed the request; see `LLM.weights`.
    """

    num_output_tokens: int
    queue_s: float
    ttft_s: float
    total_s: float
    num_cached_tokens: int
    num_preemptions: int
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    weights: str = ""

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds per token after the first; 0 if there is only one token."""
        after_first = self.num_output_tokens - 1
        return (self.total_s - self.ttft_s) / after_first if after_first > 0 else 0.0


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a completion that is streamed to a client.

    Deltas are msgspec structs because making them is fast, and there are many. (`msgspec.structs`
    has ``replace`` and ``asdict``.)

    Attributes:
        text: text that ``token_ids`` add; empty if there is no tokenizer, and in the router until
            the tokens are detokenized.
        receipt: the request's receipt; set only in the last piece.
        choice_index: number of the output among a prompt's ``n`` outputs.
        prompt_index: number of the prompt in a batch.
        stop_string: the stop string that ended the text; only in the last piece.
        pooled: result of a pooled request, little-endian float32, in a single piece without tokens.
    """

    request_id: str
    output_index: int
    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    choice_index: int = 0
    prompt_index: int = 0
    stop_string: str | None = None
    pooled: bytes = b""


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Join consecutive pieces of one output into one piece.

    The result has the logprobs of all tokens, or none if a node has left some out.

    Args:
        deltas: the pieces in order, at least one.
    """
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    logprobs = tuple(one for delta in deltas for one in delta.logprobs)
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    return msgspec.structs.replace(
        last,
        output_index=first.output_index,
        token_ids=token_ids,
        text="".join(delta.text for delta in deltas),
        logprobs=logprobs if len(logprobs) == len(token_ids) else (),
        prompt_logprobs=tuple(one for delta in deltas for one in delta.prompt_logprobs),
    )


def count_logprobs(delta: TextDelta) -> int:
    """Count the logprobs in a delta, including those of alternative tokens."""
    return sum(1 + len(one.top) for one in (*delta.logprobs, *delta.prompt_logprobs) if one)


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished output. ``text`` is empty without a tokenizer.

    Attributes:
        choice_index: number of the output among a prompt's ``n`` outputs.
        receipt: the request's receipt, if a router served the request.
        logprobs: one per token; empty if not requested.
        prompt_logprobs: one per prompt token; the first is None.
        metrics: timings of requests that `engine.LLM` completed.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    receipt: Receipt | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice_index: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    metrics: RequestMetrics | None = field(default=None, compare=False)
