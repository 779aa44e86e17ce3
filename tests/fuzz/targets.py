"""The functions that read bytes from strangers: one target each, for all drivers of this folder.

A target returns, or raises what `REFUSALS` names (one line for whoever sent the bytes). Anything
else that it raises is a finding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from baton.api.errors import BatonError
from baton.link import wire
from baton.v1 import inference_pb2, node_pb2
from baton.wire.types import sampling_params_from_proto
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol import messages
from router.api.http.completions import _prompts
from router.api.http.conversation import chat_prompt, held_output, parser_context
from router.api.http.decoding import decode
from router.api.http.errors import ApiError
from router.api.http.sampling import beams_of, sampling_params
from router.api.http.schema import ChatRequest, CompletionRequest
from router.intake.parsers.choice import OutputParsers

CORPUS = Path(__file__).parent / "corpus"
REFUSALS = (BatonError, ApiError)


def http_chat(data: bytes) -> None:
    """Read the body of a chat completion as far as it is plain values."""
    body, _ = decode(data, ChatRequest)
    held = held_output(body, OutputParsers(None))
    output = held.output if held is not None else None
    params = sampling_params(body, max_tokens=1, structured_output=output)
    chat_prompt(body)
    parser_context(body, "")
    assert params.n >= 1


def http_completion(data: bytes) -> None:
    """Read the body of a completion as far as it is plain values."""
    body, _ = decode(data, CompletionRequest)
    params = sampling_params(body, max_tokens=1, logprobs=body.logprobs)
    assert params.n >= 1
    beams_of(body)
    _prompts(body.prompt)


def grpc_generate(data: bytes) -> None:
    """Read a `Generate` message."""
    message = inference_pb2.GenerateRequest.FromString(data)
    sampling_params_from_proto(message.sampling_params)


def node_message(data: bytes) -> None:
    """Read what a node says on its link."""
    message = node_pb2.NodeMessage.FromString(data)
    wire.registration_from_proto(message.register)
    wire.node_event_from_proto(message)


def router_message(data: bytes) -> None:
    """Read what a router says on a link."""
    wire.command_from_proto(node_pb2.RouterMessage.FromString(data))


def kv_message(data: bytes) -> None:
    """Read a message between senders and receivers of KV."""
    messages.decode(data)


def peer_info(data: bytes) -> None:
    """Read what a node says of its memory."""
    PeerInfo.decode(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        http_chat,
        http_completion,
        grpc_generate,
        node_message,
        router_message,
        kv_message,
        peer_info,
    )
}


def run(name: str, data: bytes) -> bool:
    """Give bytes to a target; returns whether it took them. Raises what is a finding."""
    with contextlib.suppress(*REFUSALS, DecodeError):
        TARGETS[name](data)
        return True
    return False


def corpus(name: str) -> list[bytes]:
    """Inputs that fuzzing once found worth keeping: findings, and what reached new code."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
