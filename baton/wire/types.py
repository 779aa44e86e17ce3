"""Converts the types that all services share, of `proto/baton/v1/types.proto`.

One function per direction and type, as in `baton.link.wire`. Raises InvalidRequestError for invalid
values from a peer or client.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.outputs import (
    DecodeReceipt,
    FinishReason,
    PrefillReceipt,
    PushReceipt,
    Receipt,
    TokenLogprobs,
)
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.api.thinking import Thinking
from baton.v1 import types_pb2

_FINISH_TO_PROTO = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}
_FINISH_FROM_PROTO: dict[int, FinishReason | None] = {
    number: reason for reason, number in _FINISH_TO_PROTO.items()
}


def finish_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(number: int) -> FinishReason | None:
    """Convert a finish reason; one that only newer peers know still ends the output."""
    return _FINISH_FROM_PROTO.get(number, FinishReason.ABORT)


# ------------------------------------------------------------------ sampling parameters


def sampling_params_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Convert the parameters of one output; raises InvalidRequestError for more outputs."""
    if params.n != 1:
        raise InvalidRequestError("n", f"must be 1 for a single stream, got {params.n}")
    return types_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=None
        if params.allowed_token_ids is None
        else types_pb2.TokenIds(ids=params.allowed_token_ids),
        banned_token_ids=params.banned_token_ids,
        min_tokens=params.min_tokens,
        stop=params.stop,
        logprobs=params.logprobs,
        structured_output=_structured_output_to_proto(params.structured_output)
        if params.structured_output is not None
        else None,
        prompt_logprobs=params.prompt_logprobs,
        thinking=_thinking_to_proto(params.thinking) if params.thinking is not None else None,
    )


def sampling_params_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Convert sampling parameters; unset fields get our defaults. Raises InvalidRequestError."""
    given = {}
    for field, value in message.ListFields():
        read = _READ_PARAM.get(field.name)
        given[field.name] = value if read is None else read(value)
    return SamplingParams(**given)


def _thinking_to_proto(value: Thinking) -> types_pb2.Thinking:
    return types_pb2.Thinking(
        budget_tokens=value.budget_tokens,
        close_token_ids=value.close_token_ids,
        open_marks=[types_pb2.TokenIds(ids=mark) for mark in value.open_marks],
        is_open=value.is_open,
        must_open=value.must_open,
        may_reopen=value.may_reopen,
        behind_token_ids=value.behind_token_ids,
        gap_token_ids=value.gap_token_ids,
    )


def _thinking_from_proto(message: types_pb2.Thinking) -> Thinking:
    """Convert a thought's limits and marks; raises InvalidRequestError."""
    return Thinking(
        budget_tokens=message.budget_tokens if message.HasField("budget_tokens") else None,
        close_token_ids=tuple(message.close_token_ids),
        open_marks=tuple(tuple(mark.ids) for mark in message.open_marks),
        is_open=message.is_open,
        must_open=message.must_open,
        may_reopen=message.may_reopen,
        behind_token_ids=tuple(message.behind_token_ids),
        gap_token_ids=tuple(message.gap_token_ids),
    )


def _structured_output_to_proto(value: StructuredOutput) -> types_pb2.StructuredOutput:
    match value.kind:
        case "choice":
            return types_pb2.StructuredOutput(choice=types_pb2.Choice(texts=value.choice))
        case "json_object":
            return types_pb2.StructuredOutput(json_object=True)
        case kind:
            message = types_pb2.StructuredOutput()
            setattr(message, kind, value.text)
            return message


def _structured_output_from_proto(message: types_pb2.StructuredOutput) -> StructuredOutput:
    """Convert a structured output; raises InvalidRequestError."""
    kind = message.WhichOneof("kind")
    if kind is None:
        return StructuredOutput()  # raises an error that names the kinds
    if kind == "choice":
        return StructuredOutput(choice=tuple(message.choice.texts))
    return StructuredOutput(**{kind: getattr(message, kind)})


# Readers of the parameters that are no single number or flag.
_READ_PARAM: dict[str, Callable[[Any], Any]] = {
    "logit_bias": lambda biases: tuple(biases.items()),
    "allowed_token_ids": lambda message: tuple(message.ids),
    "banned_token_ids": tuple,
    "stop_token_ids": tuple,
    "stop": tuple,
    "structured_output": _structured_output_from_proto,
    "thinking": _thinking_from_proto,
}


# ------------------------------------------------------------------ receipts


def prefill_receipt_to_proto(receipt: PrefillReceipt) -> types_pb2.PrefillReceipt:
    return types_pb2.PrefillReceipt(
        queue_s=receipt.queue_s,
        prefill_s=receipt.prefill_s,
        num_chunks=receipt.num_chunks,
        num_computed_tokens=receipt.num_computed_tokens,
        num_cached_tokens=receipt.num_cached_tokens,
        send_s=receipt.send_s,
    )


def prefill_receipt_from_proto(message: types_pb2.PrefillReceipt) -> PrefillReceipt:
    return PrefillReceipt(
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        num_chunks=message.num_chunks,
        num_computed_tokens=message.num_computed_tokens,
        num_cached_tokens=message.num_cached_tokens,
        send_s=message.send_s,
    )


def decode_receipt_to_proto(receipt: DecodeReceipt) -> types_pb2.DecodeReceipt:
    return types_pb2.DecodeReceipt(
        parked_s=receipt.parked_s,
        first_step_s=receipt.first_step_s,
        steps_until_first=receipt.steps_until_first,
        num_prompt_tokens_computed=receipt.num_prompt_tokens_computed,
        num_forwards=receipt.num_forwards,
        num_preemptions=receipt.num_preemptions,
        push=types_pb2.PushReceipt(
            num_bytes=receipt.push.num_bytes,
            num_blocks=receipt.push.num_blocks,
            transport=receipt.push.transport,
            exposed_transfer_s=receipt.push.exposed_transfer_s,
            num_descriptors=receipt.push.num_descriptors,
            posting_s=receipt.push.posting_s,
        ),
        num_cached_tokens=receipt.num_cached_tokens,
        num_drafts=receipt.num_drafts,
        num_accepted_drafts=receipt.num_accepted_drafts,
        why_drafts=receipt.why_drafts,
    )


def decode_receipt_from_proto(message: types_pb2.DecodeReceipt) -> DecodeReceipt:
    return DecodeReceipt(
        parked_s=message.parked_s,
        first_step_s=message.first_step_s,
        steps_until_first=message.steps_until_first,
        num_prompt_tokens_computed=message.num_prompt_tokens_computed,
        num_forwards=message.num_forwards,
        num_preemptions=message.num_preemptions,
        push=PushReceipt(
            num_bytes=message.push.num_bytes,
            num_blocks=message.push.num_blocks,
            transport=message.push.transport,
            exposed_transfer_s=message.push.exposed_transfer_s,
            num_descriptors=message.push.num_descriptors,
            posting_s=message.push.posting_s,
        ),
        num_cached_tokens=message.num_cached_tokens,
        num_drafts=message.num_drafts,
        num_accepted_drafts=message.num_accepted_drafts,
        why_drafts=message.why_drafts,
    )


def receipt_to_proto(receipt: Receipt) -> types_pb2.Receipt:
    return types_pb2.Receipt(
        num_prompt_tokens=receipt.num_prompt_tokens,
        num_output_tokens=receipt.num_output_tokens,
        ttft_s=receipt.ttft_s,
        total_s=receipt.total_s,
        prefill_node=receipt.prefill_node,
        decode_node=receipt.decode_node,
        prefill=prefill_receipt_to_proto(receipt.prefill) if receipt.prefill else None,
        decode=decode_receipt_to_proto(receipt.decode) if receipt.decode else None,
        num_attempts=receipt.num_attempts,
        router_queue_s=receipt.router_queue_s,
        accept_s=receipt.accept_s,
        delivery_s=receipt.delivery_s,
    )


def receipt_from_proto(message: types_pb2.Receipt) -> Receipt:
    has = message.HasField
    return Receipt(
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        ttft_s=message.ttft_s,
        total_s=message.total_s,
        prefill_node=message.prefill_node,
        decode_node=message.decode_node,
        prefill=prefill_receipt_from_proto(message.prefill) if has("prefill") else None,
        decode=decode_receipt_from_proto(message.decode) if has("decode") else None,
        num_attempts=message.num_attempts,
        router_queue_s=message.router_queue_s,
        accept_s=message.accept_s,
        delivery_s=message.delivery_s,
    )


# ------------------------------------------------------------------ logprobs


def logprobs_to_proto(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    # A peer may send lists of different lengths.
    top = zip(message.top_token_ids, message.top_logprobs, strict=False)
    return TokenLogprobs(message.logprob, tuple(top))


def prompt_logprobs_to_proto(
    logprobs: tuple[TokenLogprobs | None, ...],
) -> Iterator[types_pb2.TokenLogprobs]:
    """Convert a prompt's logprobs; the first, always None, becomes an empty message."""
    for one in logprobs:
        yield types_pb2.TokenLogprobs() if one is None else logprobs_to_proto(one)


def prompt_logprobs_from_proto(
    messages: Sequence[types_pb2.TokenLogprobs],
) -> tuple[TokenLogprobs | None, ...]:
    # This iterates, because making all messages first takes twice as long.
    rest = itertools.islice(messages, 1, None)
    return (None, *map(logprobs_from_proto, rest)) if messages else ()
