"""Whole messages of every kind that a target reads; fuzzing starts from these."""

from __future__ import annotations

import json
from typing import Any

import torch

from baton.api.outputs import FinishReason, PrefillReceipt, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.link import wire
from baton.link import words as link
from baton.v1 import inference_pb2, types_pb2
from baton.wire.types import sampling_params_to_proto
from kvconnector.base import HandoffRecord
from kvconnector.protocol import messages
from kvconnector.transports.in_memory import InMemoryTransport
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.router.nodes import make_registration

PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    top_k=3,
    seed=11,
    stop=("end",),
    logprobs=2,
    logit_bias=((5, 1.5),),
    structured_output=StructuredOutput(json_schema={"type": "object"}),
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ],
    "tools": [TOOL],
    "tool_choice": "required",
    "temperature": 0.5,
    "logit_bias": {"5": 1.5},
    "stop": ["end"],
    "chat_template_kwargs": {"enable_thinking": False},
}
COMPLETIONS: list[dict[str, Any]] = [
    {"model": "demo", "prompt": "def add(a, b):", "n": 2, "stream": True, "logprobs": 3},
    {"model": "demo", "prompt": [[1, 2], [3]], "structured_outputs": {"regex": "[a-z]+"}},
    {
        "model": "demo",
        "prompt": ["a", "b"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {}}}},
        },
    },
]


def _grpc_generate() -> list[bytes]:
    params = sampling_params_to_proto(PARAMS)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    requests = (
        inference_pb2.GenerateRequest(text="def add(a, b):", sampling_params=params),
        inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[1, 2]), resumable=True),
        inference_pb2.GenerateRequest(chat=chat, request_id="r", session_id="s", priority=-3),
    )
    return [request.SerializeToString() for request in requests]


def _node_messages() -> list[bytes]:
    prefill = PrefillReceipt(
        queue_s=0.1, prefill_s=0.2, num_chunks=1, num_computed_tokens=3, num_cached_tokens=0
    )
    error = link.RequestError("UNAVAILABLE", "went away")
    events: list[link.NodeEvent] = [
        (
            link.RequestDelta(
                "r",
                1,
                (5, 6),
                FinishReason.STOP,
                logprobs=(TokenLogprobs(-0.5, ((5, -0.5),)), TokenLogprobs(-1.0)),
                prompt_logprobs=(None, TokenLogprobs(-2.0, ((1, -0.1),))),
                epoch=3,
                prefill=prefill,
            ),
        ),
        (
            link.RequestDelta("r", 4, (9,), epoch=3),
            link.RequestDelta("r", 0, (), epoch=3, error=error),
        ),
        link.NodeBeat(num_running=3, num_free_blocks=7),
        link.PeerReport("p0", True, "tcp", bandwidth_bytes_per_s=1e9),
        link.PeerReports((link.PeerReport("p0", True, "tcp"),), ("p1",)),
        link.KVCacheEvents(1, True, stored=(1, 2), removed=(3,)),
    ]
    found = [wire.registration_to_proto(make_registration("p", link.NodeRole.PREFILL))]
    found += map(wire.node_event_to_proto, events)
    return [message.SerializeToString() for message in found]


def _router_messages() -> list[bytes]:
    commands: list[link.RouterCommand] = [
        link.Refusal("no"),
        link.PeerUpdate("p0", b"\x01\x02"),
        link.PeerUpdates((link.PeerUpdate("p0", b"\x01\x02"),), ("p1",)),
        link.PrefillCommand(
            request_id="r",
            epoch=3,
            prompt_token_ids=[1, 2, 3],
            sampling_params=PARAMS,
            decode_engine_id="d0",
            timeout_s=5.0,
        ),
        link.DecodeCommand(
            request_id="r",
            epoch=3,
            prompt_token_ids=[1, 2, 3],
            sampling_params=PARAMS,
            prefill_engine_id="p0",
            timeout_s=5.0,
            output_token_ids=(4,),
        ),
        link.CancelCommand("r", 3),
        link.DrainCommand(stop=True),
    ]
    return [wire.command_to_proto(command).SerializeToString() for command in commands]


def _kv_messages() -> list[bytes]:
    request: dict[str, Any] = {"engine_id": "p0", "request_id": "r", "epoch": 3}
    said: list[messages.Message] = [
        messages.Hello(engine_id="p0", sent_at_s=1.0, test=2),
        messages.HelloAck(engine_id="p0", test=2, slot=1),
        messages.SelfTest(
            engine_id="p0",
            test=1,
            digest=b"12345678",
            transport="tcp",
            bandwidth_bytes_per_s=1e9,
            duration_s=0.1,
        ),
        messages.SelfTestResult(engine_id="p0", test=1, problem="none"),
        messages.Start(num_tokens=5, **request),
        messages.Grant(block_ids=[1, 2, 3], first_block=1, **request),
        messages.Watermark(num_tokens=16, num_blocks=1, **request),
        messages.Commit(
            record=HandoffRecord(token_id=5, num_tokens=16),
            num_bytes=1024,
            num_blocks=1,
            transport="tcp",
            exposed_transfer_s=0.1,
            **request,
        ),
        messages.Cancel(**request),
        messages.Quiet(reason="done", **request),
        messages.Beat(engine_id="p0", sent_at_s=2.0),
        messages.Digests(indices=[0, 1], digests=b"0" * 16, layers=(0, 2), **request),
        messages.Resend(indices=[1], layers=(0, 2), attempt=1, **request),
        messages.Verified(**request),
    ]
    return [messages.encode(message) for message in said]


def _peer_infos() -> list[bytes]:
    transport = InMemoryTransport("seeds", memory_of(torch.zeros(4, 2, 2, 1, 16, 8)))
    transport.close()
    return [transport.peer_info.encode()]


def seeds(name: str) -> list[bytes]:
    """Whole messages of a target."""
    return _SEEDS[name]


_SEEDS = {
    "http_chat": [json.dumps(CHAT).encode()],
    "http_completion": [json.dumps(body).encode() for body in COMPLETIONS],
    "grpc_generate": _grpc_generate(),
    "node_message": _node_messages(),
    "router_message": _router_messages(),
    "kv_message": _kv_messages(),
    "peer_info": _peer_infos(),
}
