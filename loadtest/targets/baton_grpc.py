"""Target over Baton's gRPC API: each message is one frame, whose token ids are counted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from baton.access.exposure import split_address
from baton.access.tls import channel_credentials, read_tls
from baton.access.tls_refusal import why_refused
from baton.api.sampling_params import SamplingParams
from baton.client.messages import credentials, models_from_proto
from baton.serving.rpc import MAX_MESSAGE_BYTES
from baton.v1 import inference_pb2, types_pb2
from baton.wire import types as wire_types
from loadtest.load.prompts import ImageMessage, Prompt, is_text
from loadtest.targets.base import Frame, Target, TargetError, TargetOptions, Usage

_GENERATE = "/baton.v1.Inference/Generate"
_LIST_MODELS = "/baton.v1.Inference/ListModels"
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this option, all channels to one address share a connection
    ("grpc.use_local_subchannel_pool", 1),
]
_START_TIMEOUT_S = 10.0


class BatonTarget:
    """A `Target` over Baton's gRPC API.

    Args:
        channels: channels to the router, which requests use in turn.
        metadata: gRPC metadata of every call.
        description: description of the target for the report.
    """

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        metadata: tuple[tuple[str, str], ...],
        description: dict[str, str],
    ) -> None:
        self._channels = channels
        self._metadata = metadata
        self._description = description
        self._calls = itertools.cycle(
            [
                channel.unary_stream(
                    _GENERATE,
                    request_serializer=None,  # `prepare` has already encoded the messages
                    response_deserializer=inference_pb2.GenerateResponse.FromString,
                )
                for channel in channels
            ]
        )

    def describe(self) -> dict[str, str]:
        return self._description

    def prepare(self, prompt: Prompt, output_length: int) -> bytes:
        params = SamplingParams(max_tokens=output_length, temperature=0.0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(
            sampling_params=wire_types.sampling_params_to_proto(params)
        )
        if isinstance(prompt, list):
            request.token_ids.ids.extend(prompt)
        elif isinstance(prompt, ImageMessage):
            parts = request.chat.messages.add(role="user").parts
            if prompt.before:
                parts.add(text=prompt.before)
            for image in prompt.images:
                parts.add(image=image)
            parts.add(text=prompt.after)
        elif is_text(prompt):
            request.text = prompt[0].content
        else:
            for message in prompt:
                request.chat.messages.add(role=message.role, content=message.content)
        return request.SerializeToString()

    async def stream(self, payload: bytes) -> AsyncGenerator[Frame, None]:
        call: Any = next(self._calls)(payload, metadata=self._metadata)
        num_tokens = 0
        is_finished = False
        try:
            while (response := await call.read()) is not EOF:
                if response.output_index != num_tokens:
                    raise TargetError(
                        "OUT_OF_ORDER",
                        f"token {num_tokens} was expected, got {response.output_index}",
                    )
                num_tokens += len(response.token_ids)
                is_finished = response.finish_reason != 0
                yield _last_frame(response) if is_finished else Frame(len(response.token_ids))
        except grpc.RpcError as error:
            raise TargetError(error.code().name, error.details() or "") from None
        finally:
            call.cancel()
        if not is_finished:
            raise TargetError("CUT_SHORT", "the stream ended before the output did")

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)


def _last_frame(response: inference_pb2.GenerateResponse) -> Frame:
    usage = receipt = None
    if response.HasField("receipt"):
        receipt = wire_types.receipt_from_proto(response.receipt)
        usage = Usage(
            receipt.num_prompt_tokens, receipt.num_output_tokens, receipt.num_cached_tokens
        )
    reason = types_pb2.FinishReason.Name(response.finish_reason)
    return Frame(
        len(response.token_ids),
        finish_reason=reason.removeprefix("FINISH_REASON_").lower(),
        usage=usage,
        receipt=receipt,
    )


async def open_target(options: TargetOptions) -> Target:
    """Connect to a router with all channels; raises ConfigError or TargetError."""
    address = options.url.removeprefix("grpc://")
    split_address("target", address)
    metadata = credentials(options.api_key or None)
    tls = read_tls(options.tls)
    channels = [
        grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        if tls is None
        else grpc.aio.secure_channel(address, channel_credentials(tls), options=_CHANNEL_OPTIONS)
        for _ in range(options.connections)
    ]
    description: dict[str, str] = {}
    for channel in channels:
        list_models: Any = channel.unary_unary(
            _LIST_MODELS,
            request_serializer=inference_pb2.ListModelsRequest.SerializeToString,
            response_deserializer=inference_pb2.ListModelsResponse.FromString,
        )
        try:
            models = await list_models(
                inference_pb2.ListModelsRequest(), metadata=metadata, timeout=_START_TIMEOUT_S
            )
        except grpc.RpcError as error:
            for opened in channels:
                await opened.close(None)
            why = await asyncio.to_thread(why_refused, address, options.tls)
            raise TargetError(
                error.code().name, f"{address} does not answer: {why or error.details()}"
            ) from None
        description = {
            "api": "baton.v1.Inference over gRPC",
            "model": ", ".join(model.name for model in models_from_proto(models)),
        }
    return BatonTarget(channels, metadata, description)
