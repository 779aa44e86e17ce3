"""What clients may send: the fields of OpenAI's requests and Baton's own, as msgspec structs.

Decoding is strict: a wrong type, and a name that nobody knows, is one line that names the field.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from baton.errors import InvalidRequestError

T = TypeVar("T")
# What a body may cost to be read, in which time nothing else is served: some tenth of a second. A
# million token ids, or some fifty thousand messages. (Bytes in texts count, too: it is a bound.)
MAX_READING_COST = 1_500_000
_COST_OF = {b",": 1, b":": 8, b"[": 10, b"{": 10}
MAX_SHOWN_CHARS = 256  # of what a client wrote, in an error about it
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_SURROGATE = re.compile(r"surrogate pair \(byte (\d+)\)")
_KEY = re.compile(rb'"(\w{1,64})"[ \t\r\n]*+:')
_KEY_WINDOW_BYTES = 1024
_NAMED = re.compile(r"(unknown|missing required) field `([^`]*)`")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How to stream.

    Attributes:
        include_usage: in a last chunk without a choice.
        continuous_usage_stats: vLLM's; in every chunk what its choice has cost up to there.
        include_obfuscation: of OpenAI's; it costs bandwidth and hides little here. Not done.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct):
    """A named JSON schema; always enforced, ``strict`` or not."""

    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's way to ask for structured output, by its names."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of requests have. ``None`` is as if the field was not there.

    Attributes:
        include_receipt: Baton's; adds ``"baton": {"receipts": [...]}`` to the response.
        session_id: Baton's; requests with the same one share a beginning. OpenAI's ``user`` is
            somebody who may have many.
        priority: vLLM's; where requests wait, smaller goes first.
        user: and those after it: taken from clients that send them, without an effect.
    """

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    include_receipt: bool | None = None
    session_id: str | None = None
    priority: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A call that the model made earlier in the conversation."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    """One message; what else responses carry, and clients send back, is passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(msgspec.Struct):
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def decode(body: bytes, kind: type[T]) -> T:
    """A request of its JSON; raises InvalidRequestError naming the field that is wrong."""
    _check_reading_cost(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        found = _SURROGATE.search(str(error))
        field = _key_before(body, int(found[1])) if found else "body"
        raise InvalidRequestError(field, f"is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        position = body.find(error.object)
        raise InvalidRequestError(
            _key_before(body, position), f"is not valid UTF-8 at byte {position + error.start}"
        ) from None
    except RecursionError:
        raise InvalidRequestError("body", "is nested too deeply") from None


def _check_reading_cost(body: bytes) -> None:
    if len(body) * max(_COST_OF.values()) <= MAX_READING_COST:
        return
    cost = sum(body.count(sign) * weight for sign, weight in _COST_OF.items())
    if cost > MAX_READING_COST:
        raise InvalidRequestError(
            "body",
            "has too many values: commas, 8 x colons and 10 x opening brackets must be at most "
            f"{MAX_READING_COST} together, got {cost}",
        )


def _key_before(body: bytes, position: int) -> str:
    """The key that a text at a place in a body belongs to, as far as one can see from there."""
    keys = _KEY.findall(body, max(position - _KEY_WINDOW_BYTES, 0), position)
    return keys[-1].decode() if keys else "body"


def _invalid(message: str) -> InvalidRequestError:
    """The library's message, "Expected `int`, got `str` - at `$.n`", as one of ours."""
    found = _PATH.search(message)
    path = found[1] if found else ""
    problem = message[: found.start()] if found else message
    if named := _NAMED.search(problem):
        path = f"{path}.{named[2]}" if path else named[2]
        known = "is needed" if named[1] == "missing required" else "is no field that Baton knows"
        return InvalidRequestError(path, known)
    return InvalidRequestError(path or "body", f"{problem[:1].lower()}{problem[1:]}")
