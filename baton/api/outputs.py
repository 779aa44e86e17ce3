"""What comes back: deltas of a running request, the finished completion, and its receipt.

Torch-free and protobuf-free, so that the engine, the nodes, the router and the client share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of a token of output or prompt, and of the most probable ones in its place.

    Natural logarithms, of the model's own distribution: before penalties, biases, bans,
    temperature and filters.

    Attributes:
        top: the most probable tokens, best first, as (token id, logprob); as many as were asked
            for. The token itself need not be among them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReceipt:
    """What the prefill node did; durations in seconds on that node's clock.

    Attributes:
        queue_s: command received -> first chunk scheduled.
        prefill_s: first chunk scheduled -> token 1 sampled.
        send_s: token 1 sampled -> given to the link to the router; 0 before, and of an older node.
    """

    queue_s: float
    prefill_s: float
    num_chunks: int
    num_computed_tokens: int
    num_cached_tokens: int
    send_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReceipt:
    """A push of KV blocks and how it ended; travels in the commit record.

    Attributes:
        num_descriptors: ranges of memory that were written, neighbours merged.
        posting_s: spent in calls that post writes; on one host they copy the bytes.
    """

    num_bytes: int
    num_blocks: int
    transport: str
    exposed_transfer_s: float
    num_descriptors: int = 0
    posting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReceipt:
    """What the decode node did; durations in seconds on that node's clock.

    Attributes:
        num_cached_tokens: prompt tokens in the node's own prefix cache, which did not travel.
        num_drafts: drafts that the node computed.
        num_accepted_drafts: drafts that became part of the output.
        why_drafts: reason for the last step's number of drafts, for people; empty: none was chosen.
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


@dataclass(frozen=True, slots=True)
class RequestError:
    """The reason why a request failed on a node.

    Attributes:
        code: name of a gRPC status code; or ``PREEMPTED``: a decode node was short of memory and
            gives the request back, for another attempt behind the tokens that it has.
    """

    code: str
    message: str


class RequestDelta(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request: what a step gave it, from the scheduler to the router.

    A struct, for one is made per output token, and a frozen dataclass takes ten times as long.

    Attributes:
        output_index: position in the output of ``token_ids[0]``; makes duplicates harmless.
        logprobs: one per token, or none when the request does not ask for them.
        prompt_logprobs: with the first output, one per prompt token, if the request asks for them;
            None for the first, which nothing comes before.
        epoch: which of a router's attempts it is of.
        prefill, decode: what it cost on a node, which adds that to its first token or to its last.
        error: ends the request on this node.
        sampled_at: of token 1, on the prefill node: when it was sampled, by `time.monotonic`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The latency receipt of a finished request.

    Attributes:
        ttft_s: request received -> token 1 handed to the client's stream.
        total_s: request received -> last token.
        num_output_tokens: tokens that the client got; a node may have computed more.
        prefill_node: the last attempt's node; all fields below are the last attempt's, too.
        decode_node: empty when the request ended with the prefill node's token.
        prefill: None when the decode node had (nearly) all of the prompt in its cache and computed
            the rest itself.
        decode: None when the request ended with the prefill node's token, or when a stop string
            ended it at the router: the decode node, still at work, was told to stop and gave no
            account.
        num_attempts: 1, unless nodes were lost, did not reach each other or were short of memory.
        router_queue_s: request received -> sent to the nodes of the attempt that gave token 1.
        accept_s: request received -> checked and tokenized; the first part of ``router_queue_s``.
        delivery_s: token 1 read from a node's link -> handed to the client's stream.
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

    @property
    def network_s(self) -> float:
        """Seconds on the links to the prefill node and back; event loops' rounds there included.

        Both ways together, because no clocks are compared. Where a decode node computed the prompt
        alone, this is its time, too.
        """
        prefill = self.prefill
        on_node_s = prefill.queue_s + prefill.prefill_s + prefill.send_s if prefill else 0.0
        return self.ttft_s - self.router_queue_s - on_node_s - self.delivery_s

    @property
    def ttft_parts(self) -> dict[str, float]:
        """Seconds of the way to token 1 by name. One part begins where another ends.

        They sum to ``ttft_s``, unless another attempt followed the one that gave token 1.
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
        """Seconds from token 1's being sampled until the decode node has its KV; None: no hand-off.

        Of two nodes' clocks: both are taken to have got their commands at the same time.
        """
        if self.prefill is None or self.decode is None:
            return None
        return max(self.decode.parked_s - self.prefill.queue_s - self.prefill.prefill_s, 0.0)

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds per token after the first; 0 when there is only one."""
        after_first = self.num_output_tokens - 1
        return (self.total_s - self.ttft_s) / after_first if after_first > 0 else 0.0

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache of the node that computed the rest."""
        computed_by = self.prefill or self.decode
        if computed_by is None:
            return 0
        # A later attempt goes on behind output tokens, and may find these, too.
        return min(computed_by.num_cached_tokens, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """The cost of a request in an engine without a network; durations in seconds.

    Attributes:
        queue_s: from its arrival until it was first scheduled.
        ttft_s: time until its first token.
        total_s: time until its last token.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_preemptions: how often the request lost its blocks and was computed again.
        num_drafts: drafts that were computed.
        num_accepted_drafts: drafts that became part of the output.
    """

    num_output_tokens: int
    queue_s: float
    ttft_s: float
    total_s: float
    num_cached_tokens: int
    num_preemptions: int
    num_drafts: int = 0
    num_accepted_drafts: int = 0

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds per token after the first; 0 when there is only one."""
        after_first = self.num_output_tokens - 1
        return (self.total_s - self.ttft_s) / after_first if after_first > 0 else 0.0


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """One streamed piece of a completion, as a client sees it; see RequestDelta.

    A struct, for one is made per piece. (`msgspec.structs` has ``replace`` and ``asdict``.)

    Attributes:
        text: that ``token_ids`` add; empty when there is no tokenizer, and in the router until
            they are text.
        receipt: with the last one.
        choice_index: which of a prompt's ``n`` outputs it belongs to.
        prompt_index: which prompt of a batch.
        stop_string: with the last one, the stop string that ended the text, if one did.
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


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Join consecutive pieces of one output, at least one, into a single piece.

    It has logprobs of all tokens or of none: a node may have left some out.
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
    """Count the logprobs of a delta: of its tokens and of their alternatives."""
    return sum(1 + len(one.top) for one in (*delta.logprobs, *delta.prompt_logprobs) if one)


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished output. ``text`` is empty when there is no tokenizer.

    Attributes:
        choice_index: number of the output among a prompt's ``n`` outputs.
        receipt: the receipt, for served requests.
        logprobs: one per token; empty if the request asked for none.
        prompt_logprobs: one per prompt token; the first is None.
        metrics: timings, for requests that `engine.LLM` completed.
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
