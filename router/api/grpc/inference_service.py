"""Inference service: the public gRPC API, which passes requests to the named model's intake."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec
import structlog

from baton.api.errors import InvalidRequestError
from baton.api.outputs import Receipt, TextDelta
from baton.api.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from baton.kv.pins import PrefixPin, check_num_pins, check_pins, check_ttl
from baton.link import wire
from baton.serving.call_gate import Context
from baton.serving.error_details import receipt_trailer
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from baton.wire import types as wire_types
from router.api.grpc import pooled
from router.api.grpc.journal import Journal
from router.calls.call import Call, Terms
from router.intake.cache_hints import make_pins, send_hint, session_hint
from router.intake.choices import accept_choices, check_num_outputs, merge_streams
from router.intake.images.image_reader import ImageFile
from router.intake.intake import MAX_REQUEST_ID_CHARS
from router.intake.pooled import PooledRequests
from router.intake.prompt_reader import IllustratedPrompt, Prompt
from router.intake.texts import ChatPrompt, check_num_messages
from router.names.served_name import ServedName
from router.names.table import NameTable

# A pooled request with more receipts sends none in its trailers, because clients limit the size of
# trailers.
MAX_TRAILERS = 16
AnyPrompt = inference_pb2.GenerateRequest | inference_pb2.Prompt
NamingRequest = (
    inference_pb2.GenerateRequest
    | inference_pb2.GenerateBatchRequest
    | inference_pb2.TokenizeRequest
    | inference_pb2.CountTokensRequest
    | inference_pb2.DropPinsRequest
    | inference_pb2.PrefetchRequest
    | inference_pb2.PooledTerms
)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves all calls of `proto/baton/v1/inference.proto`.

    Args:
        names: table of the model names that clients may use.
        journal: keeps the streams of resumable requests.
        max_timeout_s: upper limit of clients' deadlines.
    """

    def __init__(
        self,
        names: NameTable,
        *,
        journal: Journal | None = None,
        max_timeout_s: float = math.inf,
    ) -> None:
        self._names = names
        self._long_answers = names.bases[0].intake.answers.long
        self._journal = journal or Journal()
        self._max_timeout_s = max_timeout_s

    async def Generate(  # gRPC prescribes this name
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream the completion of one prompt; the receipt is repeated in the trailers."""
        async with contextlib.aclosing(await self._begin(request, context)) as deltas:
            async for delta in deltas:
                context.entry.note_tokens(len(delta.token_ids))
                if delta.receipt is not None:
                    context.set_trailing_metadata((receipt_trailer(delta.receipt),))
                yield await self._to_proto(delta)

    async def Resume(  # gRPC prescribes this name
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Continue the stream of a resumable request that the journal keeps."""
        tenant = context.principal.tenant
        _name(context, request.request_id)
        kept = self._journal.read(request.request_id, request.next_output_index, tenant=tenant)
        async with contextlib.aclosing(kept) as deltas:
            async for delta in deltas:
                context.entry.note_tokens(len(delta.token_ids))
                if delta.receipt is not None:
                    context.set_trailing_metadata((receipt_trailer(delta.receipt),))
                yield await self._to_proto(delta)

    async def GenerateBatch(  # gRPC prescribes this name
        self, request: inference_pb2.GenerateBatchRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Check all prompts, then stream their outputs as tokens arrive."""
        n = request.n or 1
        check_num_outputs("prompts", n * len(request.prompts))
        served = self._find_name(request, context)
        prompts = [_prompt_from_proto(prompt, served) for prompt in request.prompts]
        params = dataclasses.replace(_params_from_proto(request.sampling_params), n=n)
        terms = self._terms(request, context, served)
        if request.HasField("beam_search"):
            beams = wire.beam_search_from_proto(request.beam_search)
            terms = dataclasses.replace(terms, beams=beams)
        _name(context, request.request_id)
        calls = await accept_choices(served.intake, prompts, params, terms, request.request_id)
        _note_accepted(context, calls, n)
        streams = [served.intake.stream(call) for call in calls]
        async with contextlib.aclosing(merge_streams(streams)) as merged:
            async for number, delta in merged:
                context.entry.note_tokens(len(delta.token_ids))
                prompt_index, choice_index = divmod(number, n)
                yield await self._to_proto(
                    msgspec.structs.replace(
                        delta, prompt_index=prompt_index, choice_index=choice_index
                    )
                )

    async def Tokenize(  # gRPC prescribes this name
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Return the token ids that `Generate` would compute for a prompt."""
        served = self._find_name(request, context)
        prompt = _prompt_from_proto(request.prompt, served)
        token_ids = await served.intake.reader.tokenize_only(prompt, context.principal)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def CountTokens(  # gRPC prescribes this name
        self, request: inference_pb2.CountTokensRequest, context: Context
    ) -> inference_pb2.CountTokensResponse:
        """Return how many tokens a prompt has."""
        served = self._find_name(request, context)
        prompt = _prompt_from_proto(request.prompt, served)
        token_ids = await served.intake.reader.tokenize_only(prompt, context.principal)
        return inference_pb2.CountTokensResponse(num_tokens=len(token_ids))

    async def DropPins(  # gRPC prescribes this name
        self, request: inference_pb2.DropPinsRequest, context: Context
    ) -> inference_pb2.DropPinsResponse:
        """Tell the serving nodes to end the pins of one session of the caller's tenant."""
        self._send_hint(request, context)
        return inference_pb2.DropPinsResponse()

    async def Prefetch(  # gRPC prescribes this name
        self, request: inference_pb2.PrefetchRequest, context: Context
    ) -> inference_pb2.PrefetchResponse:
        """Tell the serving nodes of a model to read one session's prefix and keep it for a time."""
        check_ttl(request.ttl_s)
        self._send_hint(request, context, request.ttl_s)
        return inference_pb2.PrefetchResponse()

    def _send_hint(
        self,
        request: inference_pb2.DropPinsRequest | inference_pb2.PrefetchRequest,
        context: Context,
        keep_s: float = 0.0,
    ) -> None:
        served, principal = self._find_name(request, context), context.principal
        hint = session_hint(principal, request.session_id, request.prompt_cache_key, keep_s)
        served.intake.admission.charge_hint(principal)
        send_hint(served.base.pool, hint)

    async def ListModels(  # gRPC prescribes this name
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Return the model names that the caller may use."""
        own_names = self._names.own_names()
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=one.name,
                    max_model_len=one.intake.max_model_len,
                    parent=own_names[one.base] if one.adapter else "",
                    adapter=one.adapter,
                    image_marker=one.intake.reader.image_marker,
                )
                for one in self._names.served_to(context.principal)
            ]
        )

    async def Embed(  # gRPC prescribes this name
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Return the embedding of each input; up to 16 receipts are in the trailers."""
        response, receipts = await pooled.embed(request, self._pooled(request.terms, context))
        _note_pooled(context, receipts)
        return response

    async def Score(  # gRPC prescribes this name
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        """Return how well each document fits its query."""
        response, receipts = await pooled.score(request, self._pooled(request.terms, context))
        _note_pooled(context, receipts)
        return response

    async def Rerank(  # gRPC prescribes this name
        self, request: inference_pb2.RerankRequest, context: Context
    ) -> inference_pb2.RerankResponse:
        """Return the documents in the order in which they fit the query."""
        response, receipts = await pooled.rerank(request, self._pooled(request.terms, context))
        _note_pooled(context, receipts)
        return response

    async def Classify(  # gRPC prescribes this name
        self, request: inference_pb2.ClassifyRequest, context: Context
    ) -> inference_pb2.ClassifyResponse:
        """Return the labels of each input, with their probabilities."""
        response, receipts = await pooled.classify(request, self._pooled(request.terms, context))
        _note_pooled(context, receipts)
        return response

    def _pooled(self, asked: inference_pb2.PooledTerms, context: Context) -> PooledRequests:
        """Make pooled requests for the model that the client names, with the client's terms."""
        _name(context, asked.request_id)
        served = self._find_name(asked, context)
        return PooledRequests(served.intake, self._terms(asked, context, served), asked.request_id)

    async def _begin(
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[TextDelta, None]:
        """Begin a request, or find a resumable one in the journal; return its stream."""
        _name(context, message.request_id)
        served = self._find_name(message, context)
        intake = served.intake
        prompt, terms = _prompt_from_proto(message, served), self._terms(message, context, served)
        params = _params_from_proto(message.sampling_params)
        if not message.resumable:
            call = await intake.accept(prompt, params, terms, message.request_id)
            _note_accepted(context, [call])
            return intake.stream(call)
        content = message.SerializeToString(deterministic=True)
        tenant = terms.principal.tenant
        request_id = message.request_id or uuid.uuid4().hex
        if not self._journal.holds(request_id, content, tenant=tenant):
            call = await intake.accept(prompt, params, terms, request_id)
            _note_accepted(context, [call])
            # Check again: another call may have begun this request during the checks.
            if not self._journal.holds(request_id, content, tenant=tenant):
                deltas = intake.stream(call)
                self._journal.keep(request_id, content, deltas, tenant=tenant)
        return self._journal.read(request_id, 0, tenant=tenant)

    async def _to_proto(self, delta: TextDelta) -> inference_pb2.GenerateResponse:
        make = functools.partial(wire.text_delta_to_proto, delta)
        return await self._long_answers.make(delta, make)

    def _find_name(self, request: NamingRequest, context: Context) -> ServedName:
        """Return what a request's model name maps to; raises the errors of `NameTable.resolve`."""
        served = self._names.resolve(request.model or None, context.principal)
        context.entry.model = served.name
        return served

    def _terms(
        self,
        request: inference_pb2.GenerateRequest
        | inference_pb2.GenerateBatchRequest
        | inference_pb2.PooledTerms,
        context: Context,
        served: ServedName,
    ) -> Terms:
        timeout_s = context.time_remaining()
        if timeout_s is not None:
            timeout_s = min(timeout_s, self._max_timeout_s)
        prefixes: tuple[PrefixPin, ...] = ()
        if not isinstance(request, inference_pb2.PooledTerms):
            check_num_pins(len(request.pins))  # converting millions would block the event loop
            prefixes = wire.prefixes_from_proto(request.pins)
            check_pins(prefixes)
        return Terms(
            received_at=context.entry.began_at,
            timeout_s=timeout_s,
            session_id=request.session_id,
            priority=request.priority,
            principal=context.principal,
            trace=context.entry.trace,
            model=served.name,
            adapter=served.adapter,
            pins=make_pins(context.principal, request.session_id, prefixes),
        )


def _name(context: Context, request_id: str) -> None:
    """Put the request id, which is not checked yet, into the log lines of this call."""
    context.entry.request_id = request_id[:MAX_REQUEST_ID_CHARS]
    structlog.contextvars.bind_contextvars(request_id=context.entry.request_id or None)


def _note_accepted(context: Context, calls: Sequence[Call], num_choices: int = 1) -> None:
    """Put an accepted request's id and the total length of its prompts into the log lines."""
    if calls[0].request_id != context.entry.request_id:
        _name(context, calls[0].request_id)
    prompts = (call.prompt_token_ids for call in calls[::num_choices])
    context.entry.num_prompt_tokens = sum(map(len, prompts))


def _note_pooled(context: Context, receipts: Sequence[Receipt]) -> None:
    """Put the total length of the inputs into the log lines, and few receipts into the trailers."""
    context.entry.num_prompt_tokens = sum(one.num_prompt_tokens for one in receipts)
    shown = receipts if len(receipts) <= MAX_TRAILERS else ()
    context.set_trailing_metadata(tuple(map(receipt_trailer, shown)))


def _params_from_proto(params: types_pb2.SamplingParams) -> SamplingParams:
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS}")
    return wire_types.sampling_params_from_proto(params)


def _prompt_from_proto(request: AnyPrompt, served: ServedName) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return _illustrated(request.text, request)
        case "token_ids":
            return _illustrated(request.token_ids.ids, request)
        case "chat":
            if request.images:
                raise InvalidRequestError("images", "of a chat belong into parts of its messages")
            return _chat_from_proto(request.chat, served)
        case _:
            raise InvalidRequestError("prompt", "one of text, token_ids or chat is needed")


def _illustrated(prompt: str | Sequence[int], request: AnyPrompt) -> Prompt:
    if not request.images:
        return prompt
    files = (ImageFile(data, f"images[{i}]") for i, data in enumerate(request.images))
    return IllustratedPrompt(prompt, tuple(files))


def _chat_from_proto(chat: inference_pb2.Chat, served: ServedName) -> ChatPrompt:
    check_num_messages(len(chat.messages))
    images: list[ImageFile] = []
    messages = [
        {
            "role": message.role,
            "content": _content_from_proto(message, f"chat.messages[{i}]", images),
        }
        for i, message in enumerate(chat.messages)
    ]
    return ChatPrompt(messages, named_template=served.chat_template, images=images)


def _content_from_proto(
    message: inference_pb2.ChatMessage, field: str, images: list[ImageFile]
) -> str | list[dict[str, str]]:
    """Return a message's content, as one text or as parts.

    The files of its images are appended to ``images``.
    """
    if not message.parts:
        return message.content
    if message.content:
        raise InvalidRequestError(f"{field}.parts", "cannot be together with content")
    if message.role != "user":
        raise InvalidRequestError(f"{field}.parts", "are for messages of the role user")
    content: list[dict[str, str]] = []
    for number, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind == "image":
            images.append(ImageFile(part.image, f"{field}.parts[{number}]"))
            content.append({"type": "image"})
        elif kind == "text":
            content.append({"type": "text", "text": part.text})
        else:
            raise InvalidRequestError(f"{field}.parts[{number}]", "text or image is needed")
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content
