"""Client and AsyncClient: talk to a router from Python. No torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, cast

import grpc
import grpc.aio

from baton import rpc, wire, wire_types
from baton.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeUnavailableError,
    OverloadedError,
    RequestCancelledError,
)
from baton.outputs import Completion, FinishReason, TextDelta
from baton.sampling_params import MAX_TOKEN_ID, SamplingParams
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages such as ``[{"role": "user", "content": "Hello"}]``."""


class Client:
    """Blocking client of a router.

    Args:
        address: ``host:port`` of the router.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._address = address
        self._channel = rpc.open_sync_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole completion of one prompt; raises a BatonError."""
        return _join(list(self.stream(prompt, sampling_params, timeout_s=timeout_s)))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[TextDelta]:
        """The completion piece by piece, as it is made; leaving the loop cancels the request."""
        call = self._stub.Generate(make_request(prompt, sampling_params), timeout=timeout_s)
        try:
            for response in call:
                yield wire.text_delta_from_proto(response)
        except grpc.RpcError as error:
            _raise(error, self._address)
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """asyncio client of a router.

    Args:
        address: ``host:port`` of the router.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._address = address
        self._channel = rpc.open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole completion of one prompt; raises a BatonError."""
        deltas = self.stream(prompt, sampling_params, timeout_s=timeout_s)
        return _join([delta async for delta in deltas])

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """The completion piece by piece, as it is made; closing the iterator cancels it."""
        call = self._stub.Generate(make_request(prompt, sampling_params), timeout=timeout_s)
        try:
            async for response in call:
                yield wire.text_delta_from_proto(response)
        except grpc.RpcError as error:
            _raise(error, self._address)
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def make_request(
    prompt: Prompt, sampling_params: SamplingParams | None, request_id: str = ""
) -> inference_pb2.GenerateRequest:
    """The request message of a prompt; raises InvalidRequestError."""
    params = wire_types.sampling_params_to_proto(sampling_params or SamplingParams())
    request = inference_pb2.GenerateRequest(request_id=request_id, sampling_params=params)
    if isinstance(prompt, str):
        request.text = _checked_text("prompt", prompt)
        return request
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        for message in cast("list[Mapping[str, str]]", items):
            if not isinstance(message.get("role"), str):
                raise InvalidRequestError("chat", "each message needs a role and a content")
            request.chat.messages.add(
                role=_checked_text("chat", message["role"]),
                content=_checked_text("chat", message.get("content", "")),
            )
        return request
    for token_id in items:
        if not isinstance(token_id, int) or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequestError("prompt", f"{token_id!r} is not a token id")
    request.token_ids.CopyFrom(types_pb2.TokenIds(ids=cast("list[int]", items)))
    return request


def _checked_text(field: str, text: object) -> str:
    """The text, if it can be sent; a terminal may hand over bytes that are no characters."""
    if not isinstance(text, str):
        raise InvalidRequestError(field, f"must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, f"is not valid Unicode at {error.start}") from None
    return text


def _join(deltas: Sequence[TextDelta]) -> Completion:
    last = deltas[-1]
    return Completion(
        request_id=last.request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=last.finish_reason or FinishReason.ABORT,
        receipt=last.receipt,
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        prompt_logprobs=tuple(one for delta in deltas for one in delta.prompt_logprobs),
    )


def _raise(error: grpc.RpcError, address: str) -> NoReturn:
    """Turn a status back into the exception that made it."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, _, problem = details.partition(": ")
        raise InvalidRequestError(field, problem) from None
    if code is grpc.StatusCode.UNAVAILABLE:
        if "failed to connect" in details.lower() or "connection refused" in details.lower():
            details = f"the router at {address} cannot be reached"
        raise NodeUnavailableError(details) from None
    kinds: dict[grpc.StatusCode, type[BatonError]] = {
        grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
        grpc.StatusCode.CANCELLED: RequestCancelledError,
    }
    raise kinds.get(code, BatonError)(details or code.name) from None
