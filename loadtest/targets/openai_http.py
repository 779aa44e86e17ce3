"""Target over OpenAI's HTTP API: completions, and chats for prompts of messages.

Answers arrive as server-sent events. The protocol does not say how many tokens an event carries. So
the event's token ids, logprobs or usage are counted; without these, only the length of the frame's
text is known. Events that arrive in one read are one frame, because no client could have seen the
first event earlier.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import aiohttp
import msgspec

from baton.access.tls import client_context, read_tls
from baton.api.errors import ConfigError
from baton.api.outputs import Receipt
from baton.client.messages import credentials
from loadtest.load.prompts import ImageMessage, Prompt, is_text
from loadtest.targets.base import (
    COUNT_TOKENS_BY,
    Frame,
    Target,
    TargetError,
    TargetOptions,
    Usage,
)

PROBE = [1]  # prompt of the one request that is sent before a run, as a check
_START_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 200


_CHAT = b'{"messages":'  # beginning of a chat's message


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    content: list[msgspec.Raw] | None = None  # the messages of a chat


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the newer name; some servers send an object here
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None

    def texts(self) -> Iterator[str | None]:
        """Yield each text of the piece; a text of reasoning that has two names is yielded once."""
        reasoning = self.reasoning if isinstance(self.reasoning, str) else None
        yield from (self.content, self.reasoning_content or reasoning, self.refusal)
        for call in self.tool_calls or ():
            if call.function is not None:
                yield from (call.function.name, call.function.arguments)


class _Choice(msgspec.Struct):
    text: str | None = ""
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None

    def num_chars(self) -> int:
        """Return the length of the piece's texts in characters, whatever their fields."""
        delta = self.delta or _Delta()
        return sum(len(text or "") for text in (self.text, *delta.texts()))


class _Receipts(msgspec.Struct):
    receipts: list[Receipt]


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    baton: _Receipts | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_event = msgspec.json.Decoder(_Event).decode


class EventReader:
    """Reads the events of one answer, and counts their tokens.

    Attributes:
        is_finished: whether the event that ends the output has arrived.
    """

    def __init__(self) -> None:
        self.is_finished = False
        self._num_tokens = 0
        self._has_uncounted = False
        self._rest = b""

    def read(self, data: bytes) -> Frame | None:
        """Return arrived bytes as one frame; None if they complete no event with content.

        Raises:
            TargetError: the data cannot be parsed, or reports that the request failed.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_tokens: int | None = 0
        num_chars = 0
        finish_reason = usage = receipt = None
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                self.is_finished = True
                continue
            event = _parse(text)
            for choice in event.choices:
                counted = self._count(choice, event.usage)
                num_chars += choice.num_chars()
                num_tokens = None if counted is None or num_tokens is None else num_tokens + counted
                finish_reason = choice.finish_reason or finish_reason
            if event.usage is not None:
                usage = _usage(event.usage)
            if event.baton is not None and event.baton.receipts:
                receipt = event.baton.receipts[0]
        if finish_reason is not None:
            self.is_finished = True
        if num_tokens == 0 and finish_reason is None and usage is None and receipt is None:
            return None
        return Frame(num_tokens, num_chars, finish_reason, usage, receipt)

    def _count(self, choice: _Choice, usage: _Usage | None) -> int | None:
        """Return the number of tokens in an event's piece; None: it has text but no count."""
        counted: int | None = None
        if choice.token_ids is not None:
            counted = len(choice.token_ids)
        elif choice.logprobs is not None and choice.logprobs.tokens is not None:
            counted = len(choice.logprobs.tokens)
        elif choice.logprobs is not None and choice.logprobs.content is not None:
            counted = len(choice.logprobs.content)
        elif usage is not None and not self._has_uncounted:
            counted = max(usage.completion_tokens - self._num_tokens, 0)
        elif not choice.num_chars():
            counted = 0
        else:
            self._has_uncounted = True  # the usage of a later event includes these tokens
        self._num_tokens += counted or 0
        return counted


def _usage(found: _Usage) -> Usage:
    details = found.prompt_tokens_details
    num_cached = None if details is None else details.cached_tokens
    return Usage(found.prompt_tokens, found.completion_tokens, num_cached)


def _parse(text: bytes) -> _Event:
    try:
        event = _decode_event(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TargetError("NOT_UNDERSTOOD", f"{error}") from None
    if event.error is not None:
        raise TargetError("STREAM_ERROR", str(event.error)[:_MAX_ERROR_CHARS])
    return event


class OpenAITarget:
    """A `Target` over OpenAI's HTTP API.

    Args:
        session: an open session, which is closed with the target.
        base_url: the server's URL, which ends in /v1.
        body: common fields of all requests.
        count_tokens_by: how tokens are counted, as a text for the report.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        body: dict[str, Any],
        count_tokens_by: str,
    ) -> None:
        self._session = session
        self._base_url = base_url
        self._body = body
        self._count_tokens_by = count_tokens_by

    def describe(self) -> dict[str, str]:
        return {
            "api": "OpenAI's over HTTP",
            "model": self._body["model"],
            "tokens_counted_by": self._count_tokens_by,
        }

    def prepare(self, prompt: Prompt, output_length: int) -> bytes:
        own: dict[str, Any]
        if isinstance(prompt, list):
            own = {"prompt": prompt}
        elif isinstance(prompt, tuple) and is_text(prompt):
            own = {"prompt": prompt[0].content}
        else:
            own = {"messages": prompt if isinstance(prompt, tuple) else [_with_images(prompt)]}
            if "logprobs" in self._body:
                own["logprobs"] = True  # a boolean in chats, a number in completions
        return msgspec.json.encode(own | {"max_tokens": output_length} | self._rest(own))

    def _rest(self, own: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in self._body.items() if name not in own}

    async def stream(self, payload: bytes) -> AsyncGenerator[Frame, None]:
        events = EventReader()
        endpoint = "chat/completions" if payload.startswith(_CHAT) else "completions"
        try:
            async with self._session.post(f"{self._base_url}/{endpoint}", data=payload) as response:
                try:
                    if response.status != 200:
                        said = (await response.text(errors="replace"))[:_MAX_ERROR_CHARS]
                        raise TargetError(f"HTTP_{response.status}", said)
                    async for data in response.content.iter_any():
                        frame = events.read(data)
                        if frame is not None:
                            yield frame
                except BaseException:
                    response.close()  # closing tells the server at once that the client has gone
                    raise
        except aiohttp.ClientPayloadError as error:
            raise TargetError("CUT_SHORT", str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise TargetError("CONNECTION", str(error) or type(error).__name__) from None
        if not events.is_finished:
            raise TargetError("CUT_SHORT", "the stream ended before the output did")

    async def close(self) -> None:
        await self._session.close()


def _with_images(message: ImageMessage) -> dict[str, Any]:
    """Return a user's message with its images as data URLs."""
    parts: list[dict[str, Any]] = []
    if message.before:
        parts.append({"type": "text", "text": message.before})
    for image in message.images:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    parts.append({"type": "text", "text": message.after})
    return {"role": "user", "content": parts}


async def open_target(options: TargetOptions) -> Target:
    """Connect to a server; raises ConfigError or TargetError."""
    if options.count_tokens_by not in COUNT_TOKENS_BY:
        raise ConfigError(
            f"count_tokens_by: must be one of {', '.join(COUNT_TOKENS_BY)}, "
            f"got {options.count_tokens_by!r}"
        )
    base_url = options.url.rstrip("/")
    tls = read_tls(options.tls)
    if tls is not None and not base_url.startswith("https:"):
        raise ConfigError(f"target: must be https:// with TLS options, got {options.url!r}")
    session = aiohttp.ClientSession(
        # The number of connections has no limit: requests that waited here for a connection would
        # make the server look slow. Idle connections are closed earlier than servers usually close
        # them (uvicorn: after 5 s), because a request on a connection that the server is closing is
        # lost.
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=4, ssl=True if tls is None else client_context(tls)
        ),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={
            "Content-Type": "application/json",
            **{key.title(): value for key, value in credentials(options.api_key or None)},
        },
    )
    try:
        model = options.model or await _first_model(session, base_url)
    except BaseException:
        await session.close()
        raise
    stream_options = {"include_usage": True}
    count_tokens_by = options.count_tokens_by
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": stream_options,
        "temperature": 0,
        "ignore_eos": True,
    }
    if options.include_receipt:
        body["include_receipt"] = True
    if count_tokens_by == "auto":
        takes_it = await _takes_continuous_usage(session, f"{base_url}/completions", body)
        count_tokens_by = "continuous-usage" if takes_it else "what comes"
    if count_tokens_by == "logprobs":
        body["logprobs"] = 1
    elif count_tokens_by == "continuous-usage":
        stream_options["continuous_usage_stats"] = True
    return OpenAITarget(session, base_url, body, count_tokens_by)


async def _takes_continuous_usage(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> bool:
    """Return whether the server accepts the option ``continuous_usage_stats``."""
    asked = body | {
        "prompt": PROBE,
        "max_tokens": 1,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    timeout = aiohttp.ClientTimeout(total=_START_TIMEOUT_S)
    try:
        async with session.post(url, json=asked, timeout=timeout) as response:
            await response.read()
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    url = f"{base_url}/models"
    timeout = aiohttp.ClientTimeout(total=_START_TIMEOUT_S)
    try:
        async with session.get(url, timeout=timeout) as response:
            if response.status != 200:
                hint = "; should the target end in /v1?" if response.status == 404 else ""
                raise TargetError(f"HTTP_{response.status}", f"is what {url} answers{hint}")
            models = msgspec.json.decode(await response.read(), type=_Models)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TargetError("CONNECTION", f"{url} does not answer: {error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TargetError("NOT_UNDERSTOOD", f"the answer of {url}: {error}") from None
    if not models.data:
        raise ConfigError(f"model: must be given, {url} lists none")
    return models.data[0].id
