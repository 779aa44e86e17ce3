"""Converts the types of `proto/baton/v1/types.proto`, which all services share.

Each type has one function per direction; `baton.wire.fields` copies plain fields. Invalid values
from a peer or client raise InvalidRequestError.
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
from baton.wire.fields import from_message, to_message

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
    """Convert a finish reason; a reason that only newer peers know still ends the output."""
    return _FINISH_FROM_PROTO.get(number, FinishReason.ABORT)


# ------------------------------------------------------------------ sampling parameters


def sampling_params_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Convert sampling parameters; raises InvalidRequestError if they ask for several outputs."""
    if params.n != 1:
        raise InvalidRequestError("n", f"must be 1 for a single stream, got {params.n}")
    ids = params.allowed_token_ids
    structured, thinking = params.structured_output, params.thinking
    return to_message(
        types_pb2.SamplingParams,
        params,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=None if ids is None else types_pb2.TokenIds(ids=ids),
        structured_output=structured and _structured_output_to_proto(structured),
        thinking=thinking and _thinking_to_proto(thinking),
    )


def sampling_params_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Convert sampling parameters; unset fields get defaults. Raises InvalidRequestError."""
    given = {}
    for field, value in message.ListFields():
        read = _READ_PARAM.get(field.name)
        given[field.name] = value if read is None else read(value)
    return SamplingParams(**given)


def _thinking_to_proto(value: Thinking) -> types_pb2.Thinking:
    marks = [types_pb2.TokenIds(ids=mark) for mark in value.open_marks]
    return to_message(types_pb2.Thinking, value, open_marks=marks)


def _thinking_from_proto(message: types_pb2.Thinking) -> Thinking:
    """Convert a thought's limits and marks; raises InvalidRequestError."""
    marks = tuple(tuple(mark.ids) for mark in message.open_marks)
    return from_message(Thinking, message, open_marks=marks)


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
        # Without arguments this raises an error that names all kinds of structured outputs.
        return StructuredOutput()
    if kind == "choice":
        return StructuredOutput(choice=tuple(message.choice.texts))
    return StructuredOutput(**{kind: getattr(message, kind)})


# Name of a parameter that is no single number or flag -> function that reads it from a message.
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
    return to_message(types_pb2.PrefillReceipt, receipt)


def prefill_receipt_from_proto(message: types_pb2.PrefillReceipt) -> PrefillReceipt:
    return from_message(PrefillReceipt, message)


def decode_receipt_to_proto(receipt: DecodeReceipt) -> types_pb2.DecodeReceipt:
    push = to_message(types_pb2.PushReceipt, receipt.push)
    return to_message(types_pb2.DecodeReceipt, receipt, push=push)


def decode_receipt_from_proto(message: types_pb2.DecodeReceipt) -> DecodeReceipt:
    return from_message(DecodeReceipt, message, push=from_message(PushReceipt, message.push))


def receipt_to_proto(receipt: Receipt) -> types_pb2.Receipt:
    return to_message(
        types_pb2.Receipt,
        receipt,
        prefill=prefill_receipt_to_proto(receipt.prefill) if receipt.prefill else None,
        decode=decode_receipt_to_proto(receipt.decode) if receipt.decode else None,
    )


def receipt_from_proto(message: types_pb2.Receipt) -> Receipt:
    has = message.HasField
    return from_message(
        Receipt,
        message,
        prefill=prefill_receipt_from_proto(message.prefill) if has("prefill") else None,
        decode=decode_receipt_from_proto(message.decode) if has("decode") else None,
    )


# ------------------------------------------------------------------ logprobs


def logprobs_to_proto(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    # zip stops at the shorter list, because a peer may send lists of different lengths.
    top = zip(message.top_token_ids, message.top_logprobs, strict=False)
    return TokenLogprobs(message.logprob, tuple(top))


def prompt_logprobs_to_proto(
    logprobs: tuple[TokenLogprobs | None, ...],
) -> Iterator[types_pb2.TokenLogprobs]:
    """Convert a prompt's logprobs; the first token has no logprob and becomes an empty message."""
    for one in logprobs:
        yield types_pb2.TokenLogprobs() if one is None else logprobs_to_proto(one)


def prompt_logprobs_from_proto(
    messages: Sequence[types_pb2.TokenLogprobs],
) -> tuple[TokenLogprobs | None, ...]:
    # islice makes no list: making all messages before converting them takes twice as long.
    rest = itertools.islice(messages, 1, None)
    return (None, *map(logprobs_from_proto, rest)) if messages else ()
