"""Convert the link's words and stream pieces to protobuf and back.

Types shared by all services are in `baton/wire/types.py`. Raises InvalidRequestError for values
that a peer or a client should not have sent.
"""

from __future__ import annotations

import dataclasses

from baton.api.outputs import TextDelta
from baton.link import wire_admin_calls
from baton.link import words as link
from baton.telemetry.spans import TraceContext, parse_traceparent
from baton.v1 import admin_pb2, inference_pb2, node_pb2, types_pb2
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

_ROLE_TO_PROTO = {
    link.NodeRole.PREFILL: types_pb2.NODE_ROLE_PREFILL,
    link.NodeRole.DECODE: types_pb2.NODE_ROLE_DECODE,
}
_ROLE_FROM_PROTO = {number: role for role, number in _ROLE_TO_PROTO.items()}

# ------------------------------------------------------------------ the public stream


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


# ------------------------------------------------------------------ node -> router


def registration_to_proto(registration: link.NodeRegistration) -> node_pb2.NodeMessage:
    return node_pb2.NodeMessage(
        register=node_pb2.Register(
            node_name=registration.node_name,
            engine_id=registration.engine_id,
            role=_ROLE_TO_PROTO[registration.role],
            version=registration.version,
            address=registration.address,
            peer_info=registration.peer_info,
            compatibility=registration.compatibility,
            max_model_len=registration.max_model_len,
            num_blocks=registration.num_blocks,
            block_size=registration.block_size,
            prefix_hash=registration.prefix_hash,
            kv_bytes_per_token=registration.kv_bytes_per_token,
            computes_prompts=registration.computes_prompts,
            process_key=registration.process_key,
            tensor_parallel_size=registration.tensor_parallel_size,
            pipeline_parallel_size=registration.pipeline_parallel_size,
            protocol=registration.protocol,
            step_times=[
                node_pb2.StepTime(num_tokens=one.num_tokens, seconds=one.seconds)
                for one in registration.step_times
            ],
            decode_times=[
                node_pb2.DecodeTime(**dataclasses.asdict(one)) for one in registration.decode_times
            ],
            loads_adapters=registration.loads_adapters,
        )
    )


def registration_from_proto(message: node_pb2.Register) -> link.NodeRegistration | None:
    """Return a registration; None if the role is unknown."""
    role = _ROLE_FROM_PROTO.get(message.role)
    if role is None:
        return None
    return link.NodeRegistration(
        node_name=message.node_name,
        engine_id=message.engine_id,
        role=role,
        version=message.version,
        address=message.address,
        peer_info=message.peer_info,
        compatibility=dict(message.compatibility),
        max_model_len=message.max_model_len,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        prefix_hash=message.prefix_hash,
        kv_bytes_per_token=message.kv_bytes_per_token,
        computes_prompts=message.computes_prompts,
        process_key=message.process_key,
        tensor_parallel_size=message.tensor_parallel_size or 1,
        pipeline_parallel_size=message.pipeline_parallel_size or 1,
        protocol=message.protocol or link.FIRST_PROTOCOL,
        step_times=tuple(link.StepTime(one.num_tokens, one.seconds) for one in message.step_times),
        decode_times=tuple(
            link.DecodeTime(one.num_requests, one.num_context_tokens, one.seconds)
            for one in message.decode_times
        ),
        loads_adapters=message.loads_adapters,
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
    )


_SERVING_TO_PROTO = {
    link.ServingState.SERVING: node_pb2.SERVING_STATE_UNSPECIFIED,
    link.ServingState.DRAINING: node_pb2.SERVING_STATE_DRAINING,
    link.ServingState.DRAINED: node_pb2.SERVING_STATE_DRAINED,
}
_SERVING_FROM_PROTO = {number: state for state, number in _SERVING_TO_PROTO.items()}


_BEAT_FIELDS = [one.name for one in dataclasses.fields(link.NodeBeat)]
_BEAT_FIELDS.remove("serving_state")
_BEAT_FIELDS.remove("adapters")


def beat_to_proto(beat: link.NodeBeat) -> node_pb2.NodeBeat:
    return node_pb2.NodeBeat(
        serving_state=_SERVING_TO_PROTO[beat.serving_state],
        adapters=beat.adapters,
        **{name: getattr(beat, name) for name in _BEAT_FIELDS},
    )


def beat_from_proto(message: node_pb2.NodeBeat) -> link.NodeBeat:
    return link.NodeBeat(
        serving_state=_SERVING_FROM_PROTO.get(
            message.serving_state,
            link.ServingState.DRAINING,  # a state of a newer version
        ),
        adapters=tuple(message.adapters),
        **{name: getattr(message, name) for name in _BEAT_FIELDS},
    )


def is_plain(delta: link.RequestDelta) -> bool:
    """Return whether a delta holds tokens and nothing else."""
    return delta == link.RequestDelta(
        delta.request_id, delta.output_index, delta.token_ids, epoch=delta.epoch
    )


def split_step(deltas: tuple[link.RequestDelta, ...]) -> link.StepDeltas:
    """Pack plain tokens of several deltas into rows, which cost a thirtieth to read."""
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
        return node_pb2.NodeMessage(
            kv_events=node_pb2.KVCacheEvents(
                sequence=event.sequence,
                snapshot=event.snapshot,
                stored=event.stored,
                removed=event.removed,
            )
        )
    if isinstance(event, link.AdminReply):
        return wire_admin_calls.admin_reply_to_proto(event)
    return node_pb2.NodeMessage(
        peer_report=node_pb2.PeerReport(
            engine_id=event.engine_id,
            connected=event.connected,
            transport=event.transport,
            problem=event.problem,
            bandwidth_bytes_per_s=event.bandwidth_bytes_per_s,
        )
    )


def node_event_from_proto(message: node_pb2.NodeMessage) -> link.NodeEvent | None:
    """Return an event; None for a kind that this version does not know."""
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
        report = message.peer_report
        return link.PeerReport(
            report.engine_id,
            report.connected,
            report.transport,
            report.problem,
            report.bandwidth_bytes_per_s,
        )
    if kind == "kv_events":
        events = message.kv_events
        return link.KVCacheEvents(
            events.sequence, events.snapshot, tuple(events.stored), tuple(events.removed)
        )
    if kind == "admin_reply":
        return wire_admin_calls.admin_reply_from_proto(message.admin_reply)
    return None


def request_view_to_proto(view: link.RequestView) -> admin_pb2.RequestDescription:
    return admin_pb2.RequestDescription(
        request_id=view.request_id,
        status=view.status,
        transfer_state=view.transfer_state,
        num_tokens=view.num_tokens,
        num_computed_tokens=view.num_computed_tokens,
        num_blocks=view.num_blocks,
        age_s=view.age_s,
    )


# ------------------------------------------------------------------ router -> node


def command_to_proto(command: link.RouterCommand) -> node_pb2.RouterMessage:
    if isinstance(command, link.Refusal):
        registered = node_pb2.Registered(problem=command.problem, may_retry=command.may_retry)
        return node_pb2.RouterMessage(registered=registered)
    if isinstance(command, link.PeerUpdate):
        return node_pb2.RouterMessage(
            peer_update=node_pb2.PeerUpdate(
                engine_id=command.engine_id,
                peer_info=command.peer_info,
                removed=command.removed,
            )
        )
    if isinstance(command, link.PrefillCommand):
        return node_pb2.RouterMessage(
            prefill=node_pb2.PrefillCommand(
                request_id=command.request_id,
                epoch=command.epoch,
                prompt_token_ids=command.prompt_token_ids,
                sampling_params=sampling_params_to_proto(command.sampling_params),
                decode_engine_id=command.decode_engine_id,
                timeout_s=command.timeout_s,
                output_token_ids=command.output_token_ids,
                cache_salt=command.cache_salt,
                adapter=command.adapter,
                adapter_source=command.adapter_source,
                pins_adapter=command.pins_adapter,
                **_trace_to_proto(command.trace),
            )
        )
    if isinstance(command, link.DecodeCommand):
        return node_pb2.RouterMessage(
            decode=node_pb2.DecodeCommand(
                request_id=command.request_id,
                epoch=command.epoch,
                prompt_token_ids=command.prompt_token_ids,
                sampling_params=sampling_params_to_proto(command.sampling_params),
                prefill_engine_id=command.prefill_engine_id,
                timeout_s=command.timeout_s,
                output_token_ids=command.output_token_ids,
                cache_salt=command.cache_salt,
                adapter=command.adapter,
                adapter_source=command.adapter_source,
                pins_adapter=command.pins_adapter,
                **_trace_to_proto(command.trace),
            )
        )
    if isinstance(command, link.RouterBeat):
        return node_pb2.RouterMessage(beat=node_pb2.RouterBeat())
    if isinstance(command, link.DrainCommand):
        drain = node_pb2.DrainCommand(resume=command.resume, stop=command.stop)
        return node_pb2.RouterMessage(drain=drain)
    if isinstance(command, link.DrainSeen):
        return node_pb2.RouterMessage(drain_seen=node_pb2.DrainSeen())
    if isinstance(command, link.SendKVSnapshot):
        return node_pb2.RouterMessage(send_kv_snapshot=node_pb2.SendKVSnapshot())
    if isinstance(command, link.AdminCall):
        return wire_admin_calls.admin_call_to_proto(command)
    return node_pb2.RouterMessage(
        cancel=node_pb2.CancelCommand(request_id=command.request_id, epoch=command.epoch)
    )


def _trace_to_proto(trace: TraceContext | None) -> dict[str, str]:
    if trace is None:
        return {}
    return {"traceparent": trace.traceparent, "tracestate": trace.state}


def _trace_from_proto(
    command: node_pb2.PrefillCommand | node_pb2.DecodeCommand,
) -> TraceContext | None:
    if not command.traceparent:
        return None
    return parse_traceparent(command.traceparent, command.tracestate)


def command_from_proto(message: node_pb2.RouterMessage) -> link.RouterCommand | None:
    """Return a command; None for a kind that this version does not know."""
    kind = message.WhichOneof("message")
    if kind == "registered":
        registered = message.registered
        if not registered.problem:
            return None
        return link.Refusal(registered.problem, registered.may_retry)
    if kind == "peer_update":
        update = message.peer_update
        return link.PeerUpdate(update.engine_id, update.peer_info, update.removed)
    if kind == "prefill":
        prefill = message.prefill
        return link.PrefillCommand(
            request_id=prefill.request_id,
            epoch=prefill.epoch,
            prompt_token_ids=list(prefill.prompt_token_ids),
            sampling_params=sampling_params_from_proto(prefill.sampling_params),
            decode_engine_id=prefill.decode_engine_id,
            timeout_s=prefill.timeout_s,
            output_token_ids=tuple(prefill.output_token_ids),
            cache_salt=prefill.cache_salt,
            adapter=prefill.adapter,
            adapter_source=prefill.adapter_source,
            pins_adapter=prefill.pins_adapter,
            trace=_trace_from_proto(prefill),
        )
    if kind == "decode":
        decode = message.decode
        return link.DecodeCommand(
            request_id=decode.request_id,
            epoch=decode.epoch,
            prompt_token_ids=list(decode.prompt_token_ids),
            sampling_params=sampling_params_from_proto(decode.sampling_params),
            prefill_engine_id=decode.prefill_engine_id,
            timeout_s=decode.timeout_s,
            output_token_ids=tuple(decode.output_token_ids),
            cache_salt=decode.cache_salt,
            adapter=decode.adapter,
            adapter_source=decode.adapter_source,
            pins_adapter=decode.pins_adapter,
            trace=_trace_from_proto(decode),
        )
    if kind == "beat":
        return link.RouterBeat()
    if kind == "drain":
        return link.DrainCommand(resume=message.drain.resume, stop=message.drain.stop)
    if kind == "drain_seen":
        return link.DrainSeen()
    if kind == "send_kv_snapshot":
        return link.SendKVSnapshot()
    if kind == "admin_call":
        return wire_admin_calls.admin_call_from_proto(message.admin_call)
    if kind == "cancel":
        return link.CancelCommand(message.cancel.request_id, message.cancel.epoch)
    return None
