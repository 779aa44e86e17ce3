"""Inference service: the public gRPC API. Protobuf in, plain requests; deltas, protobuf out."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator

from baton import wire, wire_types
from baton.error_details import receipt_trailer
from baton.errors import InvalidRequestError
from baton.outputs import TextDelta
from baton.rpc import Context
from baton.sampling_params import MAX_STOP_TOKEN_IDS
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.choices import merge_streams, split_choices
from router.intake import ChatPrompt, GenerationRequest, Intake, Prompt
from router.journal import Journal

MAX_BATCH_OUTPUTS = 1024

AnyPrompt = inference_pb2.GenerateRequest | inference_pb2.Prompt


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves all calls of `proto/baton/v1/inference.proto`.

    Args:
        model: its name, for `ListModels`.
        journal: keeps resumable requests.
    """

    def __init__(self, intake: Intake, *, model: str = "", journal: Journal | None = None) -> None:
        self._intake = intake
        self._model = model
        self._journal = journal or Journal()

    async def Generate(  # gRPC's naming
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream the completion of one prompt; the receipt comes in the trailers, too."""
        async with contextlib.aclosing(await self._begin(request, context)) as deltas:
            async for delta in deltas:
                if delta.receipt is not None:
                    context.set_trailing_metadata((receipt_trailer(delta.receipt),))
                yield wire.text_delta_to_proto(delta)

    async def Resume(  # gRPC's naming
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Go on with a resumable request's stream."""
        kept = self._journal.read(request.request_id, request.next_output_index)
        async with contextlib.aclosing(kept) as deltas:
            async for delta in deltas:
                if delta.receipt is not None:
                    context.set_trailing_metadata((receipt_trailer(delta.receipt),))
                yield wire.text_delta_to_proto(delta)

    async def GenerateBatch(  # gRPC's naming
        self, request: inference_pb2.GenerateBatchRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream the outputs of several prompts as they come. All are checked before one begins."""
        streams: list[AsyncGenerator[TextDelta, None]] = []
        places = []
        for prompt_index, parts in enumerate(_split_batch(request, context.time_remaining())):
            for choice_index, part in enumerate(parts):
                streams.append(self._intake.stream(await self._intake.accept(part)))
                places.append((prompt_index, choice_index))
        async with contextlib.aclosing(merge_streams(streams)) as merged:
            async for number, delta in merged:
                prompt_index, choice_index = places[number]
                yield wire.text_delta_to_proto(
                    dataclasses.replace(delta, prompt_index=prompt_index, choice_index=choice_index)
                )

    async def Tokenize(  # gRPC's naming
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """The tokens of a prompt as `Generate` would see them."""
        token_ids = await self._intake.tokenize(_prompt_from_proto(request.prompt))
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def CountTokens(  # gRPC's naming
        self, request: inference_pb2.CountTokensRequest, context: Context
    ) -> inference_pb2.CountTokensResponse:
        """How many tokens a prompt has."""
        token_ids = await self._intake.tokenize(_prompt_from_proto(request.prompt))
        return inference_pb2.CountTokensResponse(num_tokens=len(token_ids))

    async def ListModels(  # gRPC's naming
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The one model of this router."""
        model = inference_pb2.Model(name=self._model, max_model_len=self._intake.max_model_len)
        return inference_pb2.ListModelsResponse(models=[model])

    async def _begin(
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[TextDelta, None]:
        """The stream of a request; of a resumable one that is kept already, the same again."""
        request = _request_from_proto(message, time.perf_counter(), context.time_remaining())
        if not message.resumable:
            return self._intake.stream(await self._intake.accept(request))
        content = message.SerializeToString(deterministic=True)
        request_id = message.request_id or uuid.uuid4().hex
        if not self._journal.holds(request_id, content):
            call = await self._intake.accept(dataclasses.replace(request, request_id=request_id))
            if not self._journal.holds(request_id, content):  # still not: checking takes time
                self._journal.keep(request_id, content, self._intake.stream(call))
        return self._journal.read(request_id, 0)


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


def _split_batch(
    request: inference_pb2.GenerateBatchRequest, timeout_s: float | None
) -> list[list[GenerationRequest]]:
    """Requests by prompt and output; raises InvalidRequestError."""
    received_at = time.perf_counter()
    n = request.n or 1
    num_outputs = n * len(request.prompts)
    if not 1 <= num_outputs <= MAX_BATCH_OUTPUTS:
        raise InvalidRequestError(
            "prompts", f"must make 1 to {MAX_BATCH_OUTPUTS} outputs, got {num_outputs}"
        )
    if len(request.sampling_params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS}")
    params = dataclasses.replace(
        wire_types.sampling_params_from_proto(request.sampling_params), n=n
    )
    request_id = request.request_id or uuid.uuid4().hex
    return [
        split_choices(
            GenerationRequest(
                prompt=_prompt_from_proto(prompt),
                sampling_params=params,
                request_id=f"{request_id}.{index}",
                received_at=received_at,
                timeout_s=timeout_s,
            )
        )
        for index, prompt in enumerate(request.prompts)
    ]


def _prompt_from_proto(request: AnyPrompt) -> Prompt:
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
