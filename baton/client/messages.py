"""Make the request messages of clients, and read answers and errors. Opens no connection."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

import grpc

from baton.api.beam_search import BeamSearchParams
from baton.api.errors import (
    BatonError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeUnavailableError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    UnauthenticatedError,
)
from baton.api.outputs import Completion, FinishReason, TextDelta, join_deltas
from baton.api.prompt import check_priority
from baton.api.sampling_params import MAX_TOKEN_ID, SamplingParams
from baton.link import wire
from baton.serving import rpc
from baton.serving.error_details import error_from_trailers
from baton.v1 import inference_pb2, types_pb2
from baton.wire import types as wire_types
from baton.wire.fields import from_message

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, or chat messages such as ``[{"role": "user", "content": "Hello"}]``.

The content of a user's message may be a list of parts: ``{"type": "text", "text": ...}``, and
``{"type": "image", "image": ...}`` with the bytes of an image file, or OpenAI's ``image_url`` with
a data URL. A text or token ids that contain the model's image markers are given together with the
images, as ``{"prompt": ..., "images": [...]}``.
"""

# Seconds for which a client tries to resume a broken stream; a router keeps a resumable request for
# about the same time.
RESUME_WITHIN_S = 10.0
_RESUME_PAUSE_S = 0.25
API_KEY_VARIABLE = "BATON_API_KEY"
NOBODY_LISTENS = "is it up? (baton up starts one)"


class RequestOptions(TypedDict, total=False):
    """Options that all requests have; each may be left out.

    Attributes:
        session_id: id of a conversation; requests with the same id share a beginning.
        priority: requests with a smaller number are served first when requests wait.
        model: served name of a model; empty: the first name that the caller may use.
    """

    session_id: str
    priority: int
    model: str


class GenerateOptions(RequestOptions, total=False):
    """Options of requests that generate text.

    Attributes:
        pin_s: seconds, after the answer, for which nodes keep prompt and answer in their prefix
            caches, because the session comes back; 0: nodes keep them as long as there is room.
    """

    pin_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ModelDescription:
    """A name that a router serves.

    Attributes:
        parent: name of an adapter's base model; empty: the name stands for a base model.
        adapter: digest of the adapter; empty: the name stands for a base model.
        image_marker: text that stands for an image in prompts; empty: the model takes no images.
    """

    name: str
    max_model_len: int
    parent: str = ""
    adapter: str = ""
    image_marker: str = ""


def credentials(api_key: str | None) -> rpc.Metadata:
    """Return the metadata that sends the caller's API key.

    Args:
        api_key: the key; None: take it from the environment variable ``BATON_API_KEY``; empty: no
            key.

    Raises:
        ConfigError: the key has characters that cannot be sent.
    """
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key: must be printable ASCII")
    return rpc.bearer(key)


class Progress:
    """The progress of one stream of output, which may take several calls if connections break."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        metadata: rpc.Metadata = (),
    ) -> None:
        if request.resumable and not request.request_id:
            request.request_id = uuid.uuid4().hex
        self._request = request
        self._metadata = metadata
        self._expires_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._next_output_index = 0
        self._broke_at: float | None = None

    def next_call(self, stub: Any) -> Any:
        """Start a call for the tokens that have not been received yet."""
        timeout_s = None
        if self._expires_at is not None:
            timeout_s = max(self._expires_at - time.monotonic(), 0)
        # After its first token, a stream can be resumed by its request id.
        if self._next_output_index == 0:
            return stub.Generate(self._request, timeout=timeout_s, metadata=self._metadata)
        rest = inference_pb2.ResumeRequest(
            request_id=self._request.request_id, next_output_index=self._next_output_index
        )
        return stub.Resume(rest, timeout=timeout_s, metadata=self._metadata)

    def take(self, response: inference_pb2.GenerateResponse) -> TextDelta:
        delta = wire.text_delta_from_proto(response)
        self._next_output_index = delta.output_index + len(delta.token_ids)
        self._broke_at = None
        return delta

    def pause_after(self, problem: BatonError, error: grpc.RpcError) -> float:
        """Return the seconds to pause before the next call; raise ``problem`` if there is none."""
        is_broken = error.code() is grpc.StatusCode.UNAVAILABLE and not _said_by_router(error)
        if not (self._request.resumable and is_broken):
            raise problem from None
        now = time.monotonic()
        self._broke_at = now if self._broke_at is None else self._broke_at
        if now - self._broke_at > RESUME_WITHIN_S:
            raise problem from None
        return _RESUME_PAUSE_S


def make_request(
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    request_id: str = "",
    *,
    resumable: bool = False,
    session_id: str = "",
    priority: int = 0,
    model: str = "",
    pin_s: float = 0.0,
) -> inference_pb2.GenerateRequest:
    """Make the request message for a prompt; raises InvalidRequestError."""
    check_priority(priority)
    params = wire_types.sampling_params_to_proto(sampling_params or SamplingParams())
    request = inference_pb2.GenerateRequest(
        request_id=request_id,
        sampling_params=params,
        resumable=resumable,
        session_id=_checked_text("session_id", session_id),
        priority=priority,
        model=_checked_text("model", model),
        pins=[types_pb2.PrefixPin(ttl_s=pin_s)] if pin_s else (),
    )
    _fill_prompt(request, prompt)
    return request


def make_batch_request(
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | None,
    request_id: str = "",
    *,
    beams: BeamSearchParams | None = None,
    session_id: str = "",
    priority: int = 0,
    model: str = "",
    pin_s: float = 0.0,
) -> inference_pb2.GenerateBatchRequest:
    """Make the request message for several prompts; raises InvalidRequestError.

    Args:
        beams: parameters of a beam search that finds the outputs; None: the outputs are sampled.
    """
    if isinstance(prompts, str):
        raise InvalidRequestError("prompts", "must be a list of prompts, got a text")
    check_priority(priority)
    params = sampling_params or SamplingParams()
    one = dataclasses.replace(params, n=1)
    return inference_pb2.GenerateBatchRequest(
        request_id=request_id,
        prompts=map(make_prompt, prompts),
        sampling_params=wire_types.sampling_params_to_proto(one),
        n=params.n,
        beam_search=None if beams is None else wire.beam_search_to_proto(beams),
        session_id=_checked_text("session_id", session_id),
        priority=priority,
        model=_checked_text("model", model),
        pins=[types_pb2.PrefixPin(ttl_s=pin_s)] if pin_s else (),
    )


def make_prompt(prompt: Prompt) -> inference_pb2.Prompt:
    """Make the message of a prompt; raises InvalidRequestError."""
    message = inference_pb2.Prompt()
    _fill_prompt(message, prompt)
    return message


def _fill_prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.Prompt, prompt: Prompt
) -> None:
    if isinstance(prompt, Mapping):
        _fill_prompt(request, prompt["prompt"])
        request.images.extend(image_bytes("images", one) for one in prompt.get("images", ()))
        return
    if isinstance(prompt, str):
        request.text = _checked_text("prompt", prompt)
        return
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        request.chat.messages.extend(map(_chat_message, cast("list[Mapping[str, Any]]", items)))
        return
    for token_id in items:
        if not isinstance(token_id, int) or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequestError("prompt", f"{token_id!r} is not a token id")
    request.token_ids.CopyFrom(types_pb2.TokenIds(ids=cast("list[int]", items)))


def _chat_message(message: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    """Convert one message of a chat to protobuf; raises InvalidRequestError."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError("chat", "each message needs a role and a content")
    made = inference_pb2.ChatMessage(role=_checked_text("chat", message["role"]))
    content = message.get("content", "")
    if not isinstance(content, Sequence) or isinstance(content, str):
        made.content = _checked_text("chat", content)
        return made
    for part in content:
        match part:
            case {"type": "text", "text": text}:
                made.parts.add(text=_checked_text("chat", text))
            case {"type": "image", "image": image}:
                made.parts.add(image=image_bytes("chat", image))
            case {"type": "image_url", "image_url": {"url": url} | str(url)}:
                made.parts.add(image=image_bytes("chat", url))
            case _:
                raise InvalidRequestError("chat", "parts must be a text, image or image_url")
    return made


def image_bytes(field: str, image: object) -> bytes:
    """Return an image file given as bytes or as a data URL; raises InvalidRequestError."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    head, _, text = image.partition(",") if isinstance(image, str) else ("", "", "")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise InvalidRequestError(field, "images must be bytes of a file, or a data URL in base64")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidRequestError(field, "the data URL has no valid base64") from None


def _checked_text(field: str, text: object) -> str:
    """Return a text; raises InvalidRequestError if it cannot be encoded.

    Text from a terminal may contain bytes that are not UTF-8.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(field, f"must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, f"is not valid Unicode at {error.start}") from None
    return text


def join(deltas: Sequence[TextDelta]) -> Completion:
    """Join the pieces of one output to a completion."""
    whole = join_deltas(deltas)
    return Completion(
        request_id=whole.request_id,
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason or FinishReason.ABORT,
        receipt=whole.receipt,
        logprobs=whole.logprobs,
        prompt_logprobs=whole.prompt_logprobs,
        choice_index=whole.choice_index,
    )


def join_batch(deltas: Sequence[TextDelta]) -> list[list[Completion]]:
    """Join the pieces of a batch to completions: for each prompt, the completion of each choice."""
    order = sorted(deltas, key=lambda d: (d.prompt_index, d.choice_index, d.output_index))
    return [
        [join(list(choice)) for _, choice in itertools.groupby(prompt, lambda d: d.choice_index)]
        for _, prompt in itertools.groupby(order, lambda d: d.prompt_index)
    ]


def models_from_proto(response: inference_pb2.ListModelsResponse) -> list[ModelDescription]:
    return [from_message(ModelDescription, model) for model in response.models]


def is_unreachable(error: grpc.RpcError) -> bool:
    """Return whether a call failed because the router is unreachable."""
    details = (error.details() or "").lower()
    return error.code() is grpc.StatusCode.UNAVAILABLE and (
        "failed to connect" in details or "connection refused" in details
    )


def error_of(error: grpc.RpcError, address: str, why: str = "") -> BatonError:
    """Return the error that the router sent, or an error that fits the call's gRPC status.

    Args:
        why: why the router is unreachable; empty if unknown.
    """
    code, details = error.code(), error.details() or ""
    said = error_from_trailers(details, trailers_of(error))
    if said is not None:
        return said
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, _, problem = details.partition(": ")
        return InvalidRequestError(field, problem)
    if code is grpc.StatusCode.UNAVAILABLE:
        if is_unreachable(error):
            details = f"the router at {address} cannot be reached: {why or NOBODY_LISTENS}"
        return NodeUnavailableError(details)
    kinds: dict[grpc.StatusCode, type[BatonError]] = {
        grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
        grpc.StatusCode.CANCELLED: RequestCancelledError,
        grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    }
    return kinds.get(code, BatonError)(details or code.name)


def _said_by_router(error: grpc.RpcError) -> bool:
    return error_from_trailers("", trailers_of(error)) is not None


def trailers_of(error: grpc.RpcError) -> dict[str, str | bytes]:
    """Return the trailing metadata of a failed call, by name."""
    trailers: Any = error.trailing_metadata() or ()
    return dict(trailers)
