"""Inference service: the public gRPC API. Protobuf in, plain requests; deltas, protobuf out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from baton import wire, wire_types
from baton.errors import InvalidRequestError
from baton.rpc import Context
from baton.sampling_params import MAX_STOP_TOKEN_IDS
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.intake import ChatPrompt, GenerationRequest, Intake, Prompt


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves `Generate`."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def Generate(  # gRPC's naming
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream the completion of one prompt."""
        received_at = time.perf_counter()
        call = await self._intake.accept(
            _request_from_proto(request, received_at, context.time_remaining())
        )
        async with contextlib.aclosing(self._intake.stream(call)) as deltas:
            async for delta in deltas:
                yield wire.text_delta_to_proto(delta)


def _request_from_proto(
    request: inference_pb2.GenerateRequest, received_at: float, timeout_s: float | None
) -> GenerationRequest:
    """Raises InvalidRequestError."""
    if len(request.sampling_params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS}")
    return GenerationRequest(
        prompt=_prompt_from_proto(request),
        sampling_params=wire_types.sampling_params_from_proto(request.sampling_params),
        request_id=request.request_id,
        received_at=received_at,
        timeout_s=timeout_s,
    )


def _prompt_from_proto(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return request.token_ids.ids
        case "chat":
            return ChatPrompt(
                [{"role": m.role, "content": m.content} for m in request.chat.messages]
            )
        case _:
            raise InvalidRequestError("prompt", "one of text, token_ids or chat is needed")
