"""Convert the messages of the link, and the outputs streamed to clients, to protobuf and back.

`baton/wire/types.py` has the types that all services share. Raises InvalidRequestError for values
that no peer or client should send.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from baton.api.beam_search import BeamSearchParams, EarlyStopping
from baton.api.errors import InvalidRequestError
from baton.api.images import ImageSpan, PromptImage
from baton.api.outputs import TextDelta
from baton.kv.cache_use import CacheUse
from baton.kv.pins import PinTerms, PrefixPin
from baton.link import words as link
from baton.link.wire_peers import (
    peer_reports_from_proto,
    peer_reports_to_proto,
    peer_updates_from_proto,
    peer_updates_to_proto,
)
from baton.link.wire_pooling import pooling_from_proto, pooling_to_proto
from baton.telemetry.spans import TraceContext, parse_traceparent
from baton.v1 import admin_pb2, inference_pb2, node_pb2, types_pb2
from baton.wire.fields import from_message, to_message
from baton.wire.types import (
    decode_receipt_from_proto,
    decode_receipt_to_proto,
    finish_from_proto,
    finish_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    prefill_receipt_from_proto,
    prefill_receipt_to_proto,
    prompt_logprobs_from_proto,
    prompt_logprobs_to_proto,
    receipt_from_proto,
    receipt_to_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
)

MAX_PROMPT_TOKENS = 2**31 - 1  # assumed if the length of an image's prompt is not known

_Command = TypeVar("_Command", link.PrefillCommand, link.DecodeCommand)

_ROLE_TO_PROTO = {
    link.NodeRole.PREFILL: types_pb2.NODE_ROLE_PREFILL,
    link.NodeRole.DECODE: types_pb2.NODE_ROLE_DECODE,
    link.NodeRole.ENCODE: types_pb2.NODE_ROLE_ENCODE,
}
_ROLE_FROM_PROTO = {number: role for role, number in _ROLE_TO_PROTO.items()}

# ------------------------------------------------------------------ the public stream


# Each field is written out here, because each streamed output is a message, and `to_message`, which
# copies fields by name, is slower.
def text_delta_to_proto(delta: TextDelta) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=delta.request_id,
        output_index=delta.output_index,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=finish_to_proto(delta.finish_reason),
        receipt=receipt_to_proto(delta.receipt) if delta.receipt else None,
        logprobs=map(logprobs_to_proto, delta.logprobs),
        prompt_logprobs=prompt_logprobs_to_proto(delta.prompt_logprobs),
        prompt_index=delta.prompt_index,
        choice_index=delta.choice_index,
        stop_string=delta.stop_string,
    )


def text_delta_from_proto(message: inference_pb2.GenerateResponse) -> TextDelta:
    return TextDelta(
        request_id=message.request_id,
        output_index=message.output_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=finish_from_proto(message.finish_reason),
        receipt=receipt_from_proto(message.receipt) if message.HasField("receipt") else None,
        logprobs=tuple(map(logprobs_from_proto, message.logprobs)),
        prompt_logprobs=prompt_logprobs_from_proto(message.prompt_logprobs),
        prompt_index=message.prompt_index,
        choice_index=message.choice_index,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
    )


def beam_search_to_proto(beams: BeamSearchParams) -> inference_pb2.BeamSearch:
    """Convert a beam search's parameters, except the output length and the end tokens."""
    return inference_pb2.BeamSearch(
        beam_width=beams.beam_width,
        length_penalty=beams.length_penalty,
        early_stopping=_STOPPING_TO_PROTO[beams.early_stopping],
    )


def beam_search_from_proto(message: inference_pb2.BeamSearch) -> BeamSearchParams:
    """Convert the parameters of a beam search; raises InvalidRequestError."""
    has_penalty = message.HasField("length_penalty")
    stopping = _STOPPING_FROM_PROTO.get(message.early_stopping)
    if stopping is None:
        raise InvalidRequestError("early_stopping", f"has no value {message.early_stopping}")
    return BeamSearchParams(
        beam_width=message.beam_width,
        length_penalty=message.length_penalty if has_penalty else 1.0,
        early_stopping=stopping,
    )


_STOPPING_TO_PROTO: dict[EarlyStopping, inference_pb2.EarlyStopping] = {
    False: inference_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: inference_pb2.EARLY_STOPPING_AT_ONCE,
    "never": inference_pb2.EARLY_STOPPING_NEVER,
}
_STOPPING_FROM_PROTO: dict[int, EarlyStopping] = {
    number: stopping for stopping, number in _STOPPING_TO_PROTO.items()
}


# ------------------------------------------------------------------ node -> router


def registration_to_proto(registration: link.NodeRegistration) -> node_pb2.NodeMessage:
    register = to_message(
        node_pb2.Register,
        registration,
        role=_ROLE_TO_PROTO[registration.role],
        compatibility=registration.compatibility,
        step_times=[to_message(node_pb2.StepTime, one) for one in registration.step_times],
        decode_times=[to_message(node_pb2.DecodeTime, one) for one in registration.decode_times],
        encode_times=[to_message(node_pb2.StepTime, one) for one in registration.encode_times],
        context_step_times=[
            to_message(node_pb2.StepTime, one) for one in registration.context_step_times
        ],
    )
    return node_pb2.NodeMessage(register=register)


def registration_from_proto(message: node_pb2.Register) -> link.NodeRegistration | None:
    """Return a registration, or None if its role is unknown."""
    role = _ROLE_FROM_PROTO.get(message.role)
    if role is None:
        return None
    return from_message(
        link.NodeRegistration,
        message,
        role=role,
        compatibility=dict(message.compatibility),
        # Older nodes do not send these fields.
        tensor_parallel_size=message.tensor_parallel_size or 1,
        pipeline_parallel_size=message.pipeline_parallel_size or 1,
        protocol=message.protocol or link.FIRST_PROTOCOL,
        step_times=tuple(from_message(link.StepTime, one) for one in message.step_times),
        decode_times=tuple(from_message(link.DecodeTime, one) for one in message.decode_times),
        encode_times=tuple(from_message(link.StepTime, one) for one in message.encode_times),
        context_step_times=tuple(
            from_message(link.StepTime, one) for one in message.context_step_times
        ),
    )


def role_to_proto(role: link.NodeRole) -> types_pb2.NodeRole:
    return _ROLE_TO_PROTO[role]


def _delta_to_proto(delta: link.RequestDelta) -> node_pb2.RequestDelta:
    error = delta.error
    return node_pb2.RequestDelta(
        request_id=delta.request_id,
        epoch=delta.epoch,
        output_index=delta.output_index,
        token_ids=delta.token_ids,
        finish_reason=finish_to_proto(delta.finish_reason),
        prefill=prefill_receipt_to_proto(delta.prefill) if delta.prefill else None,
        decode=decode_receipt_to_proto(delta.decode) if delta.decode else None,
        error=node_pb2.RequestError(code=error.code, message=error.message) if error else None,
        logprobs=map(logprobs_to_proto, delta.logprobs),
        prompt_logprobs=prompt_logprobs_to_proto(delta.prompt_logprobs),
        pooled=delta.pooled,
    )


def _delta_from_proto(message: node_pb2.RequestDelta) -> link.RequestDelta:
    has = message.HasField
    return link.RequestDelta(
        message.request_id,
        message.output_index,
        tuple(message.token_ids),
        finish_from_proto(message.finish_reason),
        tuple(map(logprobs_from_proto, message.logprobs)),
        prompt_logprobs_from_proto(message.prompt_logprobs),
        epoch=message.epoch,
        prefill=prefill_receipt_from_proto(message.prefill) if has("prefill") else None,
        decode=decode_receipt_from_proto(message.decode) if has("decode") else None,
        error=link.RequestError(message.error.code, message.error.message)
        if has("error")
        else None,
        pooled=message.pooled,
    )


_SERVING_TO_PROTO = {
    link.ServingState.SERVING: node_pb2.SERVING_STATE_UNSPECIFIED,
    link.ServingState.DRAINING: node_pb2.SERVING_STATE_DRAINING,
    link.ServingState.DRAINED: node_pb2.SERVING_STATE_DRAINED,
}
_SERVING_FROM_PROTO = {number: state for state, number in _SERVING_TO_PROTO.items()}


def beat_to_proto(beat: link.NodeBeat) -> node_pb2.NodeBeat:
    return to_message(
        node_pb2.NodeBeat,
        beat,
        serving_state=_SERVING_TO_PROTO[beat.serving_state],
        cache=to_message(node_pb2.CacheUse, beat.cache),
    )


def beat_from_proto(message: node_pb2.NodeBeat) -> link.NodeBeat:
    # A state that this version does not know counts as DRAINING.
    newer = link.ServingState.DRAINING
    state = _SERVING_FROM_PROTO.get(message.serving_state, newer)
    cache = from_message(CacheUse, message.cache)
    return from_message(link.NodeBeat, message, serving_state=state, cache=cache)


def is_plain(delta: link.RequestDelta) -> bool:
    """Return whether a delta has tokens, and no other results such as logprobs or an end."""
    return delta == link.RequestDelta(
        delta.request_id, delta.output_index, delta.token_ids, epoch=delta.epoch
    )


def split_step(deltas: tuple[link.RequestDelta, ...]) -> link.StepDeltas:
    """Pack deltas that only have tokens into rows, which a router reads 30 times as fast."""
    epochs, output_indexes, token_ids, others = [], [], [], []
    for delta in deltas:
        if not is_plain(delta):
            others.append(delta)
            continue
        for index, token_id in enumerate(delta.token_ids, delta.output_index):
            epochs.append(delta.epoch)
            output_indexes.append(index)
            token_ids.append(token_id)
    return link.StepDeltas(epochs, output_indexes, token_ids, tuple(others))


def node_event_to_proto(event: link.NodeEvent) -> node_pb2.NodeMessage:
    if isinstance(event, tuple):
        event = split_step(event)
    if isinstance(event, link.StepDeltas):
        return node_pb2.NodeMessage(
            deltas=node_pb2.StepDeltas(
                deltas=map(_delta_to_proto, event.deltas),
                epochs=event.epochs,
                output_indexes=event.output_indexes,
                token_ids=event.token_ids,
            )
        )
    if isinstance(event, link.NodeBeat):
        return node_pb2.NodeMessage(beat=beat_to_proto(event))
    if isinstance(event, link.KVCacheEvents):
        return node_pb2.NodeMessage(kv_events=to_message(node_pb2.KVCacheEvents, event))
    if isinstance(event, link.AdminReply):
        error = None if event.error is None else to_message(node_pb2.RequestError, event.error)
        reply = to_message(node_pb2.AdminReply, event, error=error)
        return node_pb2.NodeMessage(admin_reply=reply)
    if isinstance(event, link.PeerReports):
        return node_pb2.NodeMessage(peer_reports=peer_reports_to_proto(event))
    return node_pb2.NodeMessage(peer_report=to_message(node_pb2.PeerReport, event))


def node_event_from_proto(message: node_pb2.NodeMessage) -> link.NodeEvent | None:
    """Return an event, or None for a kind that this version does not know."""
    kind = message.WhichOneof("message")
    if kind == "deltas":
        step = message.deltas
        return link.StepDeltas(
            step.epochs[:],
            step.output_indexes[:],
            step.token_ids[:],
            tuple(map(_delta_from_proto, step.deltas)),
        )
    if kind == "beat":
        return beat_from_proto(message.beat)
    if kind == "peer_report":
        return from_message(link.PeerReport, message.peer_report)
    if kind == "peer_reports":
        return peer_reports_from_proto(message.peer_reports)
    if kind == "kv_events":
        return from_message(link.KVCacheEvents, message.kv_events)
    if kind == "admin_reply":
        reply = message.admin_reply
        has_error = reply.HasField("error")
        error = from_message(link.RequestError, reply.error) if has_error else None
        return from_message(link.AdminReply, reply, error=error)
    return None


def request_view_to_proto(view: link.RequestView) -> admin_pb2.RequestDescription:
    return to_message(admin_pb2.RequestDescription, view)


# ------------------------------------------------------------------ router -> node


def command_to_proto(command: link.RouterCommand) -> node_pb2.RouterMessage:
    if isinstance(command, link.Refusal):
        return node_pb2.RouterMessage(registered=to_message(node_pb2.Registered, command))
    if isinstance(command, link.PeerUpdate):
        return node_pb2.RouterMessage(peer_update=to_message(node_pb2.PeerUpdate, command))
    if isinstance(command, link.PeerUpdates):
        return node_pb2.RouterMessage(peer_updates=peer_updates_to_proto(command))
    if isinstance(command, link.PrefillCommand):
        messages = {**_messages_of(command), "pooling": pooling_to_proto(command.pooling)}
        prefill = to_message(node_pb2.PrefillCommand, command, **messages)
        return node_pb2.RouterMessage(prefill=prefill)
    if isinstance(command, link.DecodeCommand):
        decode = to_message(node_pb2.DecodeCommand, command, **_messages_of(command))
        return node_pb2.RouterMessage(decode=decode)
    if isinstance(command, link.EncodeCommand):
        images = map(_image_to_proto, command.images)
        encode = to_message(node_pb2.EncodeCommand, command, images=images)
        return node_pb2.RouterMessage(encode=encode)
    if isinstance(command, link.ShareCommand):
        images = map(_image_to_proto, command.images)
        share = to_message(node_pb2.ShareCommand, command, images=images)
        return node_pb2.RouterMessage(share=share)
    if isinstance(command, link.SessionHint):
        return node_pb2.RouterMessage(session_hint=to_message(node_pb2.SessionHint, command))
    if isinstance(command, link.RouterBeat):
        return node_pb2.RouterMessage(beat=to_message(node_pb2.RouterBeat, command))
    if isinstance(command, link.DrainCommand):
        return node_pb2.RouterMessage(drain=to_message(node_pb2.DrainCommand, command))
    if isinstance(command, link.DrainSeen):
        return node_pb2.RouterMessage(drain_seen=node_pb2.DrainSeen())
    if isinstance(command, link.SendKVSnapshot):
        return node_pb2.RouterMessage(send_kv_snapshot=node_pb2.SendKVSnapshot())
    if isinstance(command, link.AdminCall):
        return node_pb2.RouterMessage(admin_call=to_message(node_pb2.AdminCall, command))
    return node_pb2.RouterMessage(cancel=to_message(node_pb2.CancelCommand, command))


def _messages_of(command: link.RequestCommand) -> dict[str, Any]:
    """Return the fields of a command that are messages themselves."""
    fields: dict[str, Any] = {"sampling_params": sampling_params_to_proto(command.sampling_params)}
    if command.images:
        fields["images"] = map(_image_to_proto, command.images)
    if command.trace is not None:
        fields["traceparent"] = command.trace.traceparent
        fields["tracestate"] = command.trace.state
    if command.pins is not None:
        fields["pins"] = to_message(
            node_pb2.PinTerms,
            command.pins,
            prefixes=[to_message(types_pb2.PrefixPin, one) for one in command.pins.prefixes],
        )
    return fields


def _image_to_proto(image: PromptImage) -> node_pb2.PromptImage:
    frames, rows, columns = image.span.grid
    return to_message(
        node_pb2.PromptImage,
        image.span,
        frames=frames,
        rows=rows,
        columns=columns,
        data=image.data,
    )


def _images_from_proto(
    messages: Iterable[node_pb2.PromptImage], num_prompt_tokens: int
) -> tuple[PromptImage, ...]:
    """Convert the images of a prompt.

    Raises:
        InvalidRequestError: the images overlap, are not in order, or lie outside the prompt.
    """
    images: list[PromptImage] = []
    end = 0
    for message in messages:
        grid = (message.frames, message.rows, message.columns)
        span = from_message(ImageSpan, message, grid=grid)
        if not (end <= span.first and span.num_tokens > 0 and span.end <= num_prompt_tokens):
            raise InvalidRequestError(
                "images",
                f"must lie in order in a prompt of {num_prompt_tokens} tokens, got "
                f"{span.num_tokens} tokens at {span.first}",
            )
        end = span.end
        images.append(PromptImage(span, message.data))
    return tuple(images)


def prefixes_from_proto(messages: Iterable[types_pb2.PrefixPin]) -> tuple[PrefixPin, ...]:
    """Convert the prefixes that a request pins."""
    return tuple(from_message(PrefixPin, message) for message in messages)


def _pins_from_proto(message: node_pb2.PinTerms) -> PinTerms:
    return from_message(PinTerms, message, prefixes=prefixes_from_proto(message.prefixes))


def _trace_from_proto(
    command: node_pb2.PrefillCommand | node_pb2.DecodeCommand,
) -> TraceContext | None:
    if not command.traceparent:
        return None
    return parse_traceparent(command.traceparent, command.tracestate)


def command_from_proto(message: node_pb2.RouterMessage) -> link.RouterCommand | None:
    """Return a command, or None for a kind that this version does not know."""
    kind = message.WhichOneof("message")
    if kind == "registered":
        refusal = from_message(link.Refusal, message.registered)
        return refusal if refusal.problem else None
    if kind == "peer_update":
        return from_message(link.PeerUpdate, message.peer_update)
    if kind == "peer_updates":
        return peer_updates_from_proto(message.peer_updates)
    if kind == "prefill":
        pooling = pooling_from_proto(message.prefill)
        return _request_from_proto(link.PrefillCommand, message.prefill, pooling=pooling)
    if kind == "decode":
        return _request_from_proto(link.DecodeCommand, message.decode)
    if kind == "encode":
        images = _images_from_proto(message.encode.images, MAX_PROMPT_TOKENS)
        return from_message(link.EncodeCommand, message.encode, images=images)
    if kind == "share":
        token_ids = list(message.share.prompt_token_ids)
        images = _images_from_proto(message.share.images, MAX_PROMPT_TOKENS)
        return from_message(
            link.ShareCommand, message.share, prompt_token_ids=token_ids, images=images
        )
    if kind == "session_hint":
        return from_message(link.SessionHint, message.session_hint)
    if kind == "beat":
        return from_message(link.RouterBeat, message.beat)
    if kind == "drain":
        return from_message(link.DrainCommand, message.drain)
    if kind == "drain_seen":
        return link.DrainSeen()
    if kind == "send_kv_snapshot":
        return link.SendKVSnapshot()
    if kind == "admin_call":
        return from_message(link.AdminCall, message.admin_call)
    if kind == "cancel":
        return from_message(link.CancelCommand, message.cancel)
    return None


def _request_from_proto(
    kind: type[_Command],
    message: node_pb2.PrefillCommand | node_pb2.DecodeCommand,
    **others: Any,
) -> _Command:
    return from_message(
        kind,
        message,
        prompt_token_ids=list(message.prompt_token_ids),
        sampling_params=sampling_params_from_proto(message.sampling_params),
        trace=_trace_from_proto(message),
        images=_images_from_proto(message.images, len(message.prompt_token_ids)),
        pins=_pins_from_proto(message.pins) if message.HasField("pins") else None,
        **others,
    )
