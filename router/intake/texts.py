"""Texts: turns clients' texts and conversations into token ids without blocking the router.

A text that is too long for the model by its number of characters is refused at once. Short texts
are tokenized here; long texts and all chats go to worker processes with limits.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from baton.api.errors import InvalidRequestError, PromptTooLongError
from baton.processes.early_template import EarlyTemplate, fork_template
from baton.processes.worker_processes import WorkerProcesses, WorkLimitError, WorkLimits
from baton.processes.worker_template import Work
from baton.text.call_arguments import read_arguments
from baton.text.tokenizer import Tokenizer
from router.intake.images.image_reader import ImageFile

# Longer texts go to a worker process, because tokenizing them takes longer than sending them there
# and back.
SHORT_TEXT_CHARS = 4_000
MAX_MESSAGES = 8_192
MAX_TOOLS = 1_024
# Maximum number of bytes of a chat's tools and options. Their tokens cannot be estimated from their
# size, because templates may render them shorter.
_MAX_EXTRA_BYTES = 2**16
_MAX_CHAR_BYTES = 6  # maximum number of bytes of one character in JSON, as in "\\u0007"
_TEXT, _BARE_TEXT, _CHAT, _PAIR = b"t", b"b", b"c", b"p"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to render with a chat template.

    Attributes:
        messages: the messages. The arguments of a tool call are JSON text, as the model wrote it. A
            content is a text, or a list of parts: texts, and ``{"type": "image"}`` per image.
        tools: functions that the model may call.
        template_options: additional template variables.
        continues_last: whether the output continues the last message.
        template: the template in the request; None: the request has none.
        named_template: template of the served name, used if the request has none; empty: use the
            checkpoint's template.
        images: files of the images, in the order of the messages.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    template: str | None = None
    named_template: str = ""
    images: Sequence[ImageFile] = ()


class Texts:
    """Turns texts into token ids. Belongs to one event loop.

    Args:
        tokenizer: the checkpoint's tokenizer.
        max_model_len: maximum number of tokens of a request, from which the worker processes'
            limits of time and memory follow.
        early: a template process forked by `fork_texts`; None: worker processes are started anew.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, early: EarlyTemplate | None = None
    ) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        # Tokenizing a long prompt takes about 2 microseconds and 400 bytes per token.
        limits = WorkLimits(
            cpu_s=2.0 + 2e-5 * max_model_len,
            wall_s=20.0 + 1e-4 * max_model_len,
            memory_bytes=128 * 2**20 + 1024 * max_model_len,
        )
        options = {"folder": str(tokenizer.folder)}
        if tokenizer.template_file is not None:
            options["chat_template"] = str(tokenizer.template_file)
        work = "router.intake.texts:make_work"
        self._workers = WorkerProcesses(work, options, limits, early=early)

    def start(self) -> None:
        """Start the worker processes, so that the first chat does not wait for them."""
        self._workers.start()

    async def prepare(self) -> None:
        """Wait until the workers are ready, and render a short conversation.

        Raises:
            NodeUnavailableError: the worker processes cannot be started.
        """
        await self._workers.wait_ready()
        hello = ChatPrompt([{"role": "user", "content": "hello"}])
        # The error of this try is no error of a client; for example, the checkpoint has no chat
        # template.
        with contextlib.suppress(InvalidRequestError):
            await self.encode_chat(hello, max_model_len=self._max_model_len)

    async def encode(
        self,
        text: str,
        *,
        max_model_len: int,
        caller: str = "",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            max_model_len: maximum number of tokens that a request may have now.
            caller: the tenant whose text this is.
            add_special_tokens: whether to add the checkpoint's special tokens.

        Raises the errors of `WorkerProcesses.run`, and InvalidRequestError if the text is too long
        or exceeds a worker's limits.
        """
        self._check_num_chars("prompt", len(text), max_model_len)
        utf8 = _utf8("prompt", text)
        if len(text) <= SHORT_TEXT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        kind = _TEXT if add_special_tokens else _BARE_TEXT
        return await self._run("prompt", kind + utf8, caller)

    async def encode_pair(
        self, first: str, second: str, *, max_model_len: int, caller: str = ""
    ) -> list[int]:
        """Return the token ids of a pair of texts, with special tokens; see `encode`."""
        num_chars = len(first) + len(second)
        self._check_num_chars("prompt", num_chars, max_model_len)
        for text in (first, second):
            _utf8("prompt", text)
        if num_chars <= SHORT_TEXT_CHARS:
            return self._tokenizer.encode_pair(first, second)
        return await self._run("prompt", _PAIR + msgspec.json.encode([first, second]), caller)

    async def encode_chat(
        self,
        prompt: ChatPrompt,
        *,
        max_model_len: int,
        caller: str = "",
        replaced: tuple[str, str] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation; see `encode` and `Tokenizer.encode_chat`."""
        check_num_messages(len(prompt.messages))
        _check_count("tools", len(prompt.tools), MAX_TOOLS)
        num_chars = sum(map(_num_chars, prompt.messages))
        self._check_num_chars("messages", num_chars, max_model_len)
        try:
            frame = msgspec.json.encode(
                [
                    prompt.messages,
                    prompt.tools,
                    prompt.template_options,
                    prompt.continues_last,
                    prompt.template or prompt.named_template or None,
                    replaced,
                ]
            )
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "messages", f"must be valid Unicode: {error.reason}"
            ) from None
        except RecursionError:
            raise InvalidRequestError("tools", "are nested too deeply") from None
        limit = _MAX_EXTRA_BYTES + _MAX_CHAR_BYTES * self._max_chars(max_model_len)
        if len(frame) > limit:
            field = "tools" if prompt.tools else "chat_template_kwargs"
            field = field if prompt.template is None else "chat_template"
            raise InvalidRequestError(
                field, f"and messages must have at most {limit} bytes as JSON, got {len(frame)}"
            )
        return await self._run("messages", _CHAT + frame, caller)

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    def _check_num_chars(self, field: str, num_chars: int, max_model_len: int) -> None:
        """Raise PromptTooLongError if a text has too many characters, however it is tokenized."""
        if num_chars > self._max_chars(max_model_len):
            least = math.ceil(num_chars / self._tokenizer.longest_token_chars)
            raise PromptTooLongError(field, least, max_model_len - 1)

    def _max_chars(self, max_model_len: int) -> int:
        """Return how many characters a text may have at most to fit into the model's length."""
        return max_model_len * self._tokenizer.longest_token_chars

    async def _run(self, field: str, frame: bytes, caller: str) -> list[int]:
        try:
            answer = await self._workers.run(frame, caller=caller)
        except WorkLimitError as error:
            raise InvalidRequestError(field, f"{error} to be tokenized") from None
        token_ids = array("I")
        token_ids.frombytes(answer)
        return token_ids.tolist()


def check_num_messages(number: int) -> None:
    """Raise InvalidRequestError if a conversation has too many messages.

    This check is cheap, so it must come first.
    """
    _check_count("messages", number, MAX_MESSAGES)


def make_work(options: Mapping[str, str]) -> Work:
    """Return the function that tokenizes in worker processes; called in their template process."""
    template_file = Path(options["chat_template"]) if "chat_template" in options else None
    return _work_of(Tokenizer(Path(options["folder"]), chat_template=template_file))


def fork_texts(tokenizer: Tokenizer) -> EarlyTemplate:
    """Fork a template process for `Texts` that shares this process's tokenizer.

    Raises OSError if forking fails.
    """
    return fork_template(lambda: _work_of(tokenizer))


def _work_of(tokenizer: Tokenizer) -> Work:
    def work(frame: bytes) -> bytes:
        kind = frame[:1]
        if kind == _PAIR:
            token_ids = tokenizer.encode_pair(*msgspec.json.decode(frame[1:]))
        elif kind != _CHAT:
            text = frame[1:].decode()
            token_ids = tokenizer.encode_long(text, add_special_tokens=kind == _TEXT)
        else:
            fields = msgspec.json.decode(frame[1:])
            messages, tools, template_options, continues_last, template, replaced = fields
            for message in messages:
                _parse_arguments(message)
            token_ids = tokenizer.encode_chat(
                messages,
                tools=tools,
                template_options=template_options,
                continues_last=continues_last,
                template=template,
                replaced=replaced,
            )
        return array("I", token_ids).tobytes()

    return work


def _parse_arguments(message: dict[str, Any]) -> None:
    """Parse the arguments of tool calls from JSON text to the objects that templates expect."""
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = read_arguments(call["function"]["arguments"])


def _num_chars(message: Mapping[str, Any]) -> int:
    """Count the characters of the texts in a message's content."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text") or "") for part in content)


def _utf8(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            field, f"must be valid Unicode, got half a surrogate pair at {error.start}"
        ) from None


def _check_count(field: str, number: int, limit: int) -> None:
    if number > limit:
        raise InvalidRequestError(field, f"must have at most {limit}, got {number}")
