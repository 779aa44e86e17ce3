"""Inference service: the public gRPC API. Protobuf in, checked calls; outputs, protobuf out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator

from baton import wire, wire_types
from baton.errors import InvalidRequestError
from baton.grammars import GrammarThreads, check_structured_output
from baton.outputs import FinishReason, TextDelta
from baton.prompt import check_prompt, check_sampling_params, draw_seed
from baton.rpc import Context
from baton.sampling_params import MAX_STOP_TOKEN_IDS
from baton.stop_strings import OutputText
from baton.structured_output import StructuredOutput
from baton.tokenizer import Tokenizer
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.call import Call, CallOutput
from router.dispatcher import Dispatcher
from router.node_pool import NodePool

MAX_REQUEST_ID_CHARS = 128
# Longer texts are tokenized on a thread, so that they do not hold up the tokens of others.
_LONG_TEXT_CHARS = 20_000


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves `Generate`.

    Args:
        tokenizer: None for a checkpoint without one; it then serves token ids only.
        vocab_size: of the model.
        default_timeout_s: for calls that come without a deadline.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        pool: NodePool,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        default_timeout_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._default_timeout_s = default_timeout_s
        self._grammar_threads = GrammarThreads(1)

    async def Generate(  # gRPC's naming
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream the completion of one prompt."""
        received_at = time.perf_counter()
        call = await self._make_call(request, context, received_at)
        text = OutputText(self._tokenizer, call.sampling_params) if self._tokenizer else None
        async with contextlib.aclosing(self._dispatcher.run(call)) as outputs:
            async for item in outputs:
                delta = self._text_delta(item, text)
                yield wire.text_delta_to_proto(delta)
                if delta.finish_reason is not None:  # not always the nodes': they know no text
                    return

    def _text_delta(self, item: CallOutput, text: OutputText | None) -> TextDelta:
        """New tokens with what they add to the text; ends the output where a stop string does."""
        output = item.output
        finish_reason, receipt = output.finish_reason, item.receipt
        token_ids = output.token_ids
        piece = text.push(token_ids, last=finish_reason is not None) if text else ""
        if text is not None and text.stopped:
            finish_reason = FinishReason.STOP
            token_ids = token_ids[: text.num_tokens - output.output_index]
            receipt = dataclasses.replace(
                receipt or self._dispatcher.receipt(output.request_id),
                num_output_tokens=text.num_tokens,
            )
        return TextDelta(
            output.request_id,
            output.output_index,
            token_ids,
            piece,
            finish_reason,
            receipt,
            output.logprobs[: len(token_ids)],
            prompt_logprobs=output.prompt_logprobs,
        )

    async def _make_call(
        self,
        request: inference_pb2.GenerateRequest,
        context: Context,
        received_at: float,
    ) -> Call:
        """Check everything a client can get wrong; raises InvalidRequestError."""
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequestError(
                "request_id",
                f"must have at most {MAX_REQUEST_ID_CHARS} characters, "
                f"got {len(request.request_id)}",
            )
        if len(request.sampling_params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS}")
        params = wire_types.sampling_params_from_proto(request.sampling_params)
        check_sampling_params(params, vocab_size=self._vocab_size)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop", "this checkpoint has no tokenizer.json")
        if params.structured_output is not None:
            await self._check_structured_output(params.structured_output)
        if params.seed is None:
            # Drawn here, so that both nodes (and a retry) sample the same.
            params = dataclasses.replace(params, seed=draw_seed())
        token_ids = await self._tokenize(request)
        check_prompt(token_ids, vocab_size=self._vocab_size, max_model_len=self._pool.max_model_len)
        remaining = context.time_remaining()
        return Call(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling_params=params,
            received_at=received_at,
            timeout_s=self._default_timeout_s if remaining is None else remaining,
        )

    async def _check_structured_output(self, structured_output: StructuredOutput) -> None:
        if self._tokenizer is None:
            raise InvalidRequestError("structured_output", "this checkpoint has no tokenizer.json")
        await asyncio.wrap_future(
            self._grammar_threads.submit(check_structured_output, structured_output)
        )

    async def _tokenize(self, request: inference_pb2.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequestError("prompt", "one of text, token_ids or chat is needed")
        if kind == "token_ids":
            limit = self._pool.max_model_len - 1
            if len(request.token_ids.ids) > limit:
                raise InvalidRequestError(
                    "prompt",
                    f"must have at most {limit} tokens, got {len(request.token_ids.ids)}",
                )
            return list(request.token_ids.ids)
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt", "this checkpoint has no tokenizer.json: give token ids"
            )
        if kind == "chat":
            messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
            if not messages:
                raise InvalidRequestError("chat", "must have at least 1 message, got 0")
            return await asyncio.to_thread(self._tokenizer.encode_chat, messages)
        if len(request.text) > _LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._tokenizer.encode, request.text)
        return self._tokenizer.encode(request.text)
