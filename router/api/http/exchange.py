"""Exchange: answers one checked request, whole or as a stream, for completions and chats."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import hdrs, web

from baton.access.identity import Principal
from baton.api.errors import BatonError, InvalidRequestError, NotFoundError
from baton.api.outputs import FinishReason, Receipt, TextDelta, count_logprobs, join_deltas
from baton.kv.pins import PrefixPin
from baton.serving.access_log import AccessEntry
from baton.serving.held_calls import HeldCalls
from baton.serving.rpc import MAX_CLIENT_MESSAGE_BYTES
from baton.text.stop_strings import DetokenizeOptions
from router.api.http.decoding import decode
from router.api.http.errors import ApiError, known_error, status_of
from router.api.http.ignored_fields import note_ignored
from router.api.http.logprobs import TokenTexts, as_many
from router.api.http.responses import Choice, Receipts, Response, usage_of, usage_up_to
from router.api.http.sampling import as_client_wrote, beams_of
from router.api.http.schema import ChatRequest, SamplingRequest
from router.api.http.sse import EventStream
from router.calls.call import Call, Terms
from router.intake.cache_hints import make_pins, retention_s, session_of_key
from router.intake.choices import merge_streams
from router.intake.intake import Intake
from router.intake.parsers.base import OutputParser
from router.names.served_name import ServedName
from router.names.table import NameTable


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of the HTTP API.

    Attributes:
        names: table of the model names that clients may use.
        strict_fields: whether a field without effect is an error.
    """

    names: NameTable
    strict_fields: bool = False


class Body(Protocol):
    """Fields that every request has. Without a model name, the default name applies."""

    @property
    def model(self) -> str | None: ...


T = TypeVar("T", bound=Body)
Fields = TypeVar("Fields")

ENTRY = web.RequestKey("entry", AccessEntry)
SERVED = web.RequestKey("served", ServedName)
PRINCIPAL = web.RequestKey("principal", Principal)
# Prefixes that the client marks in its messages, as Anthropic's API allows
PINNED = web.RequestKey("pinned", tuple[PrefixPin, ...])
BODIES = web.AppKey("bodies", HeldCalls)
# Shorter bodies are read at once; a caller's longer bodies are read in turn
SHORT_BODY_BYTES = 2**16
SESSION_ID_HEADER = "X-Session-Id"
_MAX_SHOWN_CHARS = 100  # maximum number of characters that errors quote from a header
# A body may take this many seconds, and in addition the time that its bytes need at the lowest
# allowed rate.
BODY_TIMEOUT_S = 10.0
MIN_BODY_BYTES_PER_S = 64 * 2**10
# A client that still has not read its response this many seconds after its deadline is
# disconnected.
READ_GRACE_S = 30.0
# Maximum number of logprobs in a response without stream, over all outputs. Building more takes
# much memory and blocks the event loop.
MAX_LOGPROBS_AT_ONCE = 300_000
# Maximum number of prompt token ids in one response. A prompt counts once per output.
MAX_RETURNED_TOKEN_IDS = 2**20


class Dialect(Protocol):
    """The way in which an API writes the outputs of one request.

    Attributes:
        id_prefix: prefix of response ids.
        object: value of the response's field ``object`` without stream.
        chunk_object: value of the field ``object`` in a chunk of a stream.
    """

    id_prefix: str
    object: str
    chunk_object: str

    def parser(self, index: int) -> OutputParser | None:
        """Return the parser that divides this output into parts; None: it is plain text."""
        ...

    def chunk(self, index: int, delta: TextDelta) -> Choice:
        """Return the choice of the stream's next chunk, even if the delta adds no text.

        Each delta makes a chunk, because clients measure token times between chunks.
        """
        ...

    def on_delta(self, index: int, delta: TextDelta) -> None:
        """Read the next piece of an output, for a response without stream.

        Pieces are read as they arrive, because reading all of them at the end would block the event
        loop.
        """
        ...

    def choice(self, index: int, delta: TextDelta) -> Choice:
        """Return an output as the choice of a response without stream, from its joined deltas."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One checked request, which `respond` answers.

    Attributes:
        calls: one call per output, grouped by prompt.
        num_choices: outputs per prompt.
        prompt_only: whether the client wants its prompts back, with logprobs, but no output.
    """

    request: web.Request
    intake: Intake
    body: SamplingRequest
    calls: list[Call]
    num_choices: int
    dialect: Dialect
    prompt_only: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    async def respond(self) -> web.StreamResponse:
        """Run the calls and return their response; if the client disconnects, end the calls."""
        entry = self.request[ENTRY]
        of_prompts = self.calls[:: self.num_choices]
        entry.num_prompt_tokens = sum(len(call.prompt_token_ids) for call in of_prompts)
        if self.body.stream:
            return await respond_in_events(
                self.request, self.calls, self._send_events, EventStream.fail
            )
        deltas: list[list[TextDelta]] = [[] for _ in self.calls]
        num_logprobs = 0
        with as_client_wrote(self.body):
            async with contextlib.aclosing(self._merged()) as merged:
                async for index, delta in merged:
                    deltas[index].append(delta)
                    self.dialect.on_delta(index, delta)
                    entry.note_tokens(len(delta.token_ids))
                    num_logprobs += count_logprobs(delta)
                    if num_logprobs > MAX_LOGPROBS_AT_ONCE:
                        raise InvalidRequestError(
                            "logprobs",
                            f"a response without stream may have {MAX_LOGPROBS_AT_ONCE} in all",
                        )
        outputs = [join_deltas(parts) for parts in deltas]
        receipts = [_receipt_of(output) for output in outputs]
        make = self.intake.answers.long.make
        response = self._response(
            self.dialect.object,
            [
                self._with_ids(
                    await make(output, functools.partial(self.dialect.choice, index, output)),
                    output,
                )
                for index, output in enumerate(outputs)
            ],
            receipts,
        )
        self._add_prompt_ids(response)
        if isinstance(self.body, ChatRequest) and self.body.prompt_logprobs is not None:
            token_ids, found = self.calls[0].prompt_token_ids, outputs[0].prompt_logprobs
            texts = TokenTexts(self.intake.tokenizer)
            response.prompt_logprobs = await make(
                outputs[0],
                functools.partial(texts.prompt, token_ids, as_many(found, len(token_ids))),
            )
        response.usage = usage_of(receipts, self.num_choices)
        return web.Response(body=msgspec.json.encode(response), content_type="application/json")

    async def _send_events(self, events: EventStream) -> None:
        with as_client_wrote(self.body):
            await self._send_chunks(events)

    async def _send_chunks(self, events: EventStream) -> None:
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        wants_all_usage = options is not None and bool(options.continuous_usage_stats)
        receipts: dict[int, Receipt] = {}
        async with contextlib.aclosing(self._merged()) as merged:
            async for index, delta in merged:
                self.request[ENTRY].note_tokens(len(delta.token_ids))
                ended = []
                if delta.finish_reason is not None:
                    ended = [_receipt_of(delta)]
                    receipts[index] = ended[0]
                made = await self.intake.answers.long.make(
                    delta, functools.partial(self.dialect.chunk, index, delta)
                )
                choice = self._with_ids(made, delta)
                chunk = self._response(self.dialect.chunk_object, [choice], ended)
                if delta.output_index == 0:
                    self._add_prompt_ids(chunk)
                if wants_all_usage:
                    num_prompt_tokens = len(self.calls[index].prompt_token_ids)
                    chunk.usage = usage_up_to(num_prompt_tokens, delta)
                elif wants_usage:
                    chunk.usage = None
                await events.send(chunk)
        if wants_usage:
            chunk = self._response(self.dialect.chunk_object, [], [])
            in_order = [receipts[index] for index in range(len(self.calls))]
            chunk.usage = usage_of(in_order, self.num_choices)
            await events.send(chunk)
        await events.end_with_mark()

    def _with_ids(self, choice: Choice, delta: TextDelta) -> Choice:
        if self.body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        return choice

    def _add_prompt_ids(self, response: Response) -> None:
        """Add the prompt's token ids to the response of a chat, if the client asks for them.

        In completions, each choice has the ids of its own prompt.
        """
        if self.body.return_token_ids and isinstance(self.body, ChatRequest):
            response.prompt_token_ids = self.calls[0].prompt_token_ids

    def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        streams = [
            self.intake.stream(call, self.dialect.parser(index))
            for index, call in enumerate(self.calls)
        ]
        return merge_streams([without_output(s) for s in streams] if self.prompt_only else streams)

    def _response(self, kind: str, choices: list[Any], receipts: list[Receipt]) -> Response:
        response = Response(
            id=self.dialect.id_prefix + self.calls[0].request_id,
            object=kind,
            created=self.created,
            model=self.body.model,
            choices=choices,
        )
        if self.body.include_receipt and receipts:
            response.baton = Receipts(receipts)
        return response


async def respond_in_events(
    request: web.Request,
    calls: Sequence[Call],
    send: Callable[[EventStream], Awaitable[None]],
    fail: Callable[[EventStream, BatonError | ApiError], Awaitable[None]],
) -> web.StreamResponse:
    """Stream the events of a request's calls, and return the response.

    Args:
        send: sends all events.
        fail: sends an error as the last event.
    """
    events = EventStream(request)
    deadline_s = max(call.timeout_s for call in calls)
    try:
        # The calls' deadlines do not end a response that the client does not read, so it has a time
        # limit of its own.
        async with asyncio.timeout(deadline_s + READ_GRACE_S):
            await send(events)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    # Every error is caught, because the status is sent already: only an event can report the error.
    except Exception as error:
        if not events.begun or isinstance(error, ConnectionError):
            raise
        known = known_error(error)
        request[ENTRY].error = str(status_of(known))
        await fail(events, known)
    return events.response


def terms_of(request: web.Request, body: SamplingRequest, received_at: float) -> Terms:
    """Return the terms of a request from its body, headers and key; raises InvalidRequestError."""
    principal = request[PRINCIPAL]
    session_id = (
        body.session_id
        or request.headers.get(SESSION_ID_HEADER)
        or session_of_key(principal, body.prompt_cache_key or "")
    )
    return Terms(
        received_at=received_at,
        session_id=session_id,
        priority=body.priority or 0,
        beams=beams_of(body),
        principal=principal,
        cache_word=body.cache_salt or "",
        model=request[SERVED].name,
        adapter=request[SERVED].adapter,
        trace=request[ENTRY].trace,
        text_options=DetokenizeOptions(
            skip_special_tokens=body.skip_special_tokens is not False,
            include_stop=bool(body.include_stop_str_in_output),
        ),
        pins=make_pins(principal, session_id, _pinned_prefixes(request, body)),
    )


def _pinned_prefixes(request: web.Request, body: SamplingRequest) -> Sequence[PrefixPin]:
    """Return the prefixes that a request pins; note a time that has no effect."""
    options = body.prompt_cache_options
    field, text = "prompt_cache_retention", body.prompt_cache_retention
    if options is not None and options.ttl is not None:
        field, text = "prompt_cache_options.ttl", options.ttl
    if text is None:
        marked: Sequence[PrefixPin] = request.get(PINNED, ())
        return marked
    ttl_s = retention_s(text)
    if ttl_s is None:
        note_ignored(request, [field])
        return ()
    return (PrefixPin(ttl_s),)


def check_num_returned(num_token_ids: int) -> None:
    """Raise InvalidRequestError if a response would return too many prompt token ids."""
    if num_token_ids > MAX_RETURNED_TOKEN_IDS:
        raise InvalidRequestError(
            "return_token_ids",
            f"prompts of all outputs must have at most {MAX_RETURNED_TOKEN_IDS} tokens, "
            f"got {num_token_ids}",
        )


async def read_body(request: web.Request, kind: type[T], options: HttpOptions) -> T:
    """Return the request's fields; store the served name in the web request, under `SERVED`.

    Raises:
        InvalidRequestError: a field is wrong.
        ApiError: the body is not JSON, comes too slowly, or names a model that is not served.
        BatonError: the caller may not use the name, or no node can serve it.
    """
    body = await read_fields(request, kind, strict=options.strict_fields)
    request[SERVED] = find_name(options.names, body.model, request[PRINCIPAL])
    request[ENTRY].model = request[SERVED].name
    return body


async def read_fields(request: web.Request, kind: type[Fields], *, strict: bool) -> Fields:
    """Return the request's fields; note the fields without effect for the response header.

    Args:
        strict: whether a field without effect is an error.

    Raises:
        InvalidRequestError: a field is wrong.
        ApiError: the body is not JSON, or comes too slowly.
    """
    # `request.content_type` is not used: it takes seconds for a header with thousands of
    # semicolons.
    content_type, _, _ = request.headers.get(hdrs.CONTENT_TYPE, "no").partition(";")
    if content_type.strip().lower() != "application/json":
        # Insisting on JSON also stops foreign web pages: browsers let them send JSON only after a
        # CORS check.
        found = content_type.strip()[:_MAX_SHOWN_CHARS]
        raise ApiError(415, f"{hdrs.CONTENT_TYPE}: must be application/json, got {found}")
    raw = await _read_in_turn(request)
    body, ignored = decode(raw, kind, strict=strict)
    note_ignored(request, ignored)
    return body


def check_stream(body: SamplingRequest) -> None:
    """Raise InvalidRequestError for fields that are not allowed with this value of ``stream``."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "is for stream: true only")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs", "is for stream: false only")


async def _read_in_turn(request: web.Request) -> bytes:
    """Return the request's body; a caller's long bodies are read one after another."""
    if 0 < (request.content_length or 0) <= SHORT_BODY_BYTES:
        return await _read_in_time(request)
    caller = request[PRINCIPAL].name or request.remote or ""
    async with request.app[BODIES].turn(caller):
        return await _read_in_time(request)


async def _read_in_time(request: web.Request) -> bytes:
    """Return the request's body; raises ApiError if the body is too large or comes too slowly."""
    limit, declared = MAX_CLIENT_MESSAGE_BYTES, request.content_length or 0
    parts, num_bytes = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S) as timeout:
            began_at = asyncio.get_running_loop().time()
            while declared <= limit and (part := await request.content.readany()):
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > limit:
                    break
                in_s = BODY_TIMEOUT_S + num_bytes / MIN_BODY_BYTES_PER_S
                timeout.reschedule(began_at + in_s)
    except TimeoutError:
        raise ApiError(
            408,
            f"body: must come within {BODY_TIMEOUT_S:g} s, or at {MIN_BODY_BYTES_PER_S} bytes/s; "
            f"{num_bytes} bytes came",
        ) from None
    if max(num_bytes, declared) > limit:
        got = declared or f"more than {limit}"
        raise ApiError(413, f"body: must have at most {limit} bytes, got {got}")
    return b"".join(parts)


async def without_output(
    stream: AsyncGenerator[TextDelta, None],
) -> AsyncGenerator[TextDelta, None]:
    """Yield the delta of a one-token output without its token.

    The delta still has the prompt's logprobs and receipt.
    """
    async with contextlib.aclosing(stream) as deltas:
        async for delta in deltas:
            yield msgspec.structs.replace(
                delta,
                token_ids=(),
                text="",
                finish_reason=FinishReason.LENGTH,
                receipt=dataclasses.replace(_receipt_of(delta), num_output_tokens=0),
                logprobs=(),
            )


def _receipt_of(delta: TextDelta) -> Receipt:
    """Return the receipt of an output's last delta."""
    assert delta.receipt is not None
    return delta.receipt


def list_name(names: NameTable, name: str, principal: Principal) -> ServedName:
    """Return what a name maps to, even if no nodes serve it; raises ApiError for unknown names."""
    for served in names.served_to(principal):
        if served.name == name:
            return served
    return find_name(names, name, principal)


def find_name(names: NameTable, name: str | None, principal: Principal) -> ServedName:
    """Return what a name maps to; raises ApiError if the name is unknown."""
    try:
        return names.resolve(name, principal)
    except NotFoundError as error:
        raise ApiError(404, str(error), param="model", code="model_not_found") from None
