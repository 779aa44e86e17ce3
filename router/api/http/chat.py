"""`POST /v1/chat/completions`: a conversation in, the assistant's message out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aiohttp import web

from baton.api.beam_search import MAX_BEAM_TOKENS
from baton.api.errors import InvalidRequestError
from baton.api.images import PromptImage
from baton.api.outputs import FinishReason, TextDelta
from router.api.http.conversation import (
    Grammars,
    asked_thinking,
    effort_field,
    effort_of,
    held_output,
    open_formats,
    parser_context,
    read_chat_prompt,
    takes_effort,
    unseen_results,
)
from router.api.http.errors import REQUEST_ID
from router.api.http.exchange import (
    ENTRY,
    PRINCIPAL,
    SERVED,
    Exchange,
    HttpOptions,
    check_stream,
    read_body,
    terms_of,
)
from router.api.http.ignored_fields import note_ignored
from router.api.http.logprobs import TokenTexts
from router.api.http.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    FunctionDelta,
    FunctionObject,
    MessageDelta,
    ToolCallDelta,
    ToolCallObject,
)
from router.api.http.sampling import as_client_wrote, sampling_params
from router.api.http.schema import ChatRequest
from router.calls.beam_run import most_search_tokens
from router.calls.call import Call
from router.intake.answers.divided_text import DividedDelta
from router.intake.choices import accept_choices
from router.intake.parsers import NONE
from router.intake.parsers.base import CallArguments, CallBegins, OutputParser, Part, Reasoning
from router.names.defaults import NameDefaults


@dataclass(frozen=True, slots=True)
class _Said:
    """One piece of a chat's output, sorted into the fields of a message.

    A call that began in an earlier piece has no name and no id here.

    Attributes:
        num_begun: number of calls that begin in this piece.
    """

    text: str
    reasoning: str
    calls: list[ToolCallDelta]
    num_begun: int


def divide(parts: Iterable[Part], num_calls: int) -> _Said:
    """Sort the parts of one piece of output into the fields of a message.

    Args:
        num_calls: number of calls that began in earlier pieces of this output.
    """
    texts: list[str] = []
    reasoning: list[str] = []
    begun: dict[int, CallBegins] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning.append(text)
            case CallBegins():
                begun[num_calls + len(begun)] = part
                arguments[num_calls + len(begun) - 1] = []
            case CallArguments(text):
                arguments.setdefault(num_calls + len(begun) - 1, []).append(text)
            case _:
                texts.append(part)
    calls = [
        _call_delta(index, begun.get(index), "".join(written))
        for index, written in arguments.items()
    ]
    return _Said("".join(texts), "".join(reasoning), calls, len(begun))


def _call_delta(index: int, begins: CallBegins | None, arguments: str) -> ToolCallDelta:
    if begins is None:
        return ToolCallDelta(index, FunctionDelta(arguments))
    function = FunctionDelta(arguments, begins.name)
    return ToolCallDelta(index, function, begins.call_id, "function")


class ChatDialect:
    """Writes the outputs of one chat request.

    Args:
        parsers: one parser per output.
        texts: texts of tokens, for logprobs; None if the request asks for no logprobs.
    """

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, parsers: list[OutputParser], texts: TokenTexts | None) -> None:
        self._parsers = parsers
        self._texts = texts
        self._num_calls = [0] * len(parsers)
        self._begun = [False] * len(parsers)
        # the parts of each output, for a response without stream
        self._parts: list[list[Part]] = [[] for _ in parsers]

    def parser(self, index: int) -> OutputParser | None:
        return self._parsers[index]

    def chunk(self, index: int, delta: TextDelta) -> ChatChunkChoice:
        said = divide(_parts(delta), self._num_calls[index])
        self._num_calls[index] += said.num_begun
        message = MessageDelta()
        if not self._begun[index]:
            self._begun[index] = True
            message = MessageDelta(role="assistant", content="")
        if said.text:
            message.content = said.text
        if said.reasoning:
            message.reasoning_content = message.reasoning = said.reasoning
        if said.calls:
            message.tool_calls = said.calls
        logprobs = self._logprobs(delta)
        finish_reason = self._finish_reason(index, delta.finish_reason)
        if message == MessageDelta() and finish_reason is None:
            message.content = ""  # so that each step makes a chunk, even without text
        return ChatChunkChoice(index, message, logprobs, finish_reason)

    def choice(self, index: int, delta: TextDelta) -> ChatChoice:
        said = divide(self._parts[index], 0)
        message = AssistantMessage(said.text)
        if said.reasoning:
            message.reasoning_content = message.reasoning = said.reasoning
        if said.calls:
            message.content = said.text if said.text.strip() else None
            message.tool_calls = [
                ToolCallObject(str(call.id), FunctionObject(str(name), call.function.arguments))
                for call in said.calls
                if (name := call.function.name)
            ]
        reason = self._finish_reason(index, delta.finish_reason)
        assert reason is not None
        return ChatChoice(index, message, self._logprobs(delta), reason)

    def on_delta(self, index: int, delta: TextDelta) -> None:
        parts = _parts(delta)
        self._num_calls[index] += sum(isinstance(part, CallBegins) for part in parts)
        self._parts[index] += parts

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        if reason is FinishReason.STOP and self._num_calls[index]:
            return "tool_calls"
        return reason.value if reason is not None else None

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if self._texts is None or not delta.logprobs:
            return None
        return self._texts.chat(delta.token_ids, delta.logprobs)


def _parts(delta: TextDelta) -> tuple[Part, ...]:
    # `parser` never returns None here, so outputs are divided into parts
    assert isinstance(delta, DividedDelta)
    return delta.parts


async def chat_completions(request: web.Request, options: HttpOptions) -> web.StreamResponse:
    """Answer a chat request; `web.middleware` turns raised errors into responses."""
    received_at = request[ENTRY].began_at
    body = await read_body(request, ChatRequest, options)
    intake = request[SERVED].intake
    check_stream(body)
    note_effort(request, body, effort_field(body))
    if body.thinking is not None and intake.abilities.parsers.reasoning_parser == NONE:
        note_ignored(request, ["thinking"])
    calls, dialect = await open_chat(request, body, received_at)
    return await Exchange(
        request=request,
        intake=intake,
        body=body,
        calls=calls,
        num_choices=len(calls),
        dialect=dialect,
    ).respond()


def note_effort(request: web.Request, body: ChatRequest, field: str) -> None:
    """Report thinking fields as ignored if the model does not think.

    Args:
        field: the client's field with the reasoning effort.
    """
    intake = request[SERVED].intake
    if intake.abilities.parsers.reasoning_parser != NONE:
        return
    template = intake.tokenizer.chat_template if intake.tokenizer is not None else None
    reasoning = body.reasoning
    if effort_of(body) is not None and not takes_effort(template):
        note_ignored(request, [field])
    if reasoning is not None and reasoning.max_tokens is not None:
        note_ignored(request, ["reasoning.max_tokens"])
    if body.thinking_token_budget is not None:
        note_ignored(request, ["thinking_token_budget"])


async def open_chat(
    request: web.Request,
    body: ChatRequest,
    received_at: float,
    grammars: Grammars | None = None,
) -> tuple[list[Call], ChatDialect]:
    """Check a chat request; return one call per output, and the dialect that writes them.

    Args:
        grammars: the Lark grammars of custom tools (`conversation.Grammars`).

    Raises InvalidRequestError, and the errors of tokenizing.
    """
    served = request[SERVED]
    intake, named = served.intake, served.defaults
    if body.modalities not in (None, ["text"]):
        raise InvalidRequestError("modalities", 'must be ["text"]: the model writes nothing else')
    with as_client_wrote(body):
        held = held_output(body, intake.abilities.parsers, grammars)
    if held is None:
        note_ignored(request, open_formats(body, grammars or {}))
    note_ignored(request, unseen_results(body))
    intake.admission.check_key(request[PRINCIPAL])  # cheap checks come before expensive work
    template = intake.tokenizer.chat_template if intake.tokenizer is not None else None
    asked = asked_thinking(body, template)
    prompt = await intake.reader.read(
        await read_chat_prompt(request, body, served), request[PRINCIPAL], body.cache_salt or ""
    )
    token_ids = prompt.token_ids
    params = sampling_params(
        body,
        max_tokens=_max_tokens(body, intake.max_model_len - len(token_ids), named, prompt.images),
        defaults={**intake.sampling_defaults, **named.sampling},
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        structured_output=held.output if held is not None else None,
    )
    is_constrained = params.structured_output is not None
    parsers = intake.abilities.parsers
    thinking = parsers.thinking(
        token_ids,
        asked,
        is_constrained=is_constrained,
        before_calls=held is not None and not held.is_common_call,
    )
    params = dataclasses.replace(params, thinking=thinking)
    terms = terms_of(request, body, received_at)
    context = parser_context(body, parsers.prompt_end(token_ids), grammars, thinking)
    shown = parsers.shown_token_ids(with_tools=bool(context.tools))
    if shown:
        text_options = dataclasses.replace(terms.text_options, shown_token_ids=shown)
        terms = dataclasses.replace(terms, text_options=text_options)
    with as_client_wrote(body):
        calls = await accept_choices(intake, [prompt], params, terms, request[REQUEST_ID])
    texts = TokenTexts(intake.tokenizer) if body.logprobs else None
    is_free = held is not None and held.is_free
    make = functools.partial(
        parsers.make,
        context,
        is_forced=held is not None and held.is_common_call,
        is_constrained=is_constrained and not is_free,
        is_either=held is not None and held.is_either,
        thinks=thinking is not None,
        several=body.parallel_tool_calls is not False,
    )
    return calls, ChatDialect([make() for _ in calls], texts)


def _max_tokens(
    body: ChatRequest, room: int, named: NameDefaults, images: Sequence[PromptImage]
) -> int:
    """Return the maximum number of output tokens; the default is the most that limits allow."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    least = max(1, body.min_tokens or 0)
    if not body.use_beam_search:
        return named.num_tokens(asked, max(room, least))
    most = max(min(MAX_BEAM_TOKENS, most_search_tokens(images, body.best_of or body.n or 1)), least)
    found = named.num_tokens(asked, max(min(room, most), least))
    return found if asked is not None else min(found, most)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs: true")
    return None
