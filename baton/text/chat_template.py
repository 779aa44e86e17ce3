"""ChatTemplate: renders a conversation with a checkpoint's Jinja template.

The rendered text equals that of `transformers`. Checkpoints are not trusted: templates run in
Jinja's sandbox, and the router runs them in a process that can be killed.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from baton.api.bounded_files import read_file, read_object
from baton.api.errors import ConfigError, InvalidRequestError, ModelLoadError
from baton.api.printable import printable

DEFAULT, TOOL_USE = "default", "tool_use"
# Maximum size of a template in bytes; the largest known templates have 20 kB.
MAX_TEMPLATE_BYTES = 2**20
_MAX_SHOWN_CHARS = 500  # maximum number of characters of Jinja's message about a broken template
# Errors that Python raises for templates that are nested too deeply, such as twenty-one loops.
_NOT_COMPILED = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
_MORE_TEMPLATES = "additional_chat_templates"
# Fields of a message's reasoning. Most templates read the first field; gpt-oss reads the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


# Length of call ids: Mistral's templates refuse ids that are not nine letters and digits.
_SHORT_IDS = re.compile(r"id\s*\|\s*length\s*(?:[!=<>]=|<|>)\s*9\b")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_PROBE = "baton: is this shown?"
_NOT_RENDERED = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip


class ChatTemplate:
    """The chat templates of one checkpoint, by name.

    Args:
        sources: template texts by name; `DEFAULT` for chats, `TOOL_USE` for chats with tools.
        special_tokens: special tokens, as variables that templates use, such as ``bos_token``.
        origin: file or option that the templates come from, to name in errors.

    Attributes:
        takes_tools: whether the template uses tools.
        variables: names of variables that the template uses in a chat with tools.

    Raises:
        ModelLoadError: a template does not compile.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: Path
    ) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._templates = {n: environment.from_string(s) for n, s in self.sources.items()}
            asked = _undeclared(environment, self.sources[self._name(with_tools=True)])
        except (jinja2.TemplateError, *_NOT_COMPILED) as error:
            why = printable(str(error))[:_MAX_SHOWN_CHARS] or type(error).__name__
            raise ModelLoadError(
                f"tokenizer: the chat template in {origin} is broken: {why}"
            ) from error
        self._has_short_ids = any(map(_SHORT_IDS.search, self.sources.values()))
        self.variables = asked
        self.takes_tools = "tools" in asked

    def source(self, *, with_tools: bool) -> str:
        """Return the text of the template for a chat with or without tools."""
        return self.sources[self._name(with_tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation up to the beginning of the assistant's answer.

        Args:
            messages: messages whose contents are texts, or lists of parts for messages with images.
            options: additional variables for the template, such as ``enable_thinking``.

        Raises:
            InvalidRequestError: the template refuses the messages.
        """
        variables = {
            **self._special_tokens,
            "documents": None,
            "add_generation_prompt": True,
            **(options or {}),
            "messages": [self._as_read(message) for message in messages],
            "tools": list(tools) or None,  # None without tools, because templates test for None
        }
        try:
            return self._templates[self._name(bool(tools))].render(variables)
        except _NOT_RENDERED as error:
            raise InvalidRequestError("chat", f"the chat template refused it: {error}") from error

    @functools.cached_property
    def reads_parts_only(self) -> bool:
        """Return whether the template shows contents that are lists of parts, but no plain text.

        Many templates of models with images only read lists. The template is rendered twice to find
        out.
        """
        return not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        """Return whether the rendered text shows a message with this content."""
        variables = {
            **self._special_tokens,
            "messages": [{"role": "user", "content": content}],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return _PROBE in self._templates[DEFAULT].render(variables)
        except _NOT_RENDERED:
            return False

    def _as_read(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template reads, for example with lists of parts."""
        plain = _as_templates_read(message)
        if isinstance(plain.get("content"), str) and self.reads_parts_only:
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        return with_short_ids(plain) if self._has_short_ids else plain

    def _name(self, with_tools: bool) -> str:
        return TOOL_USE if with_tools and TOOL_USE in self.sources else DEFAULT


def load_chat_template(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, or None if the checkpoint has none.

    Args:
        config: content of the checkpoint's `tokenizer_config.json`.
    """
    sources = _named(config.get("chat_template"))
    if not sources:  # checkpoints of early 2024 have the template in another file
        sources = _named(_in_its_own_json(folder))
    if (folder / "chat_template.jinja").is_file():
        sources[DEFAULT] = _read(folder / "chat_template.jinja")
    for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja")):
        sources[path.stem] = _read(path)
    return ChatTemplate(sources, special_tokens, folder) if DEFAULT in sources else None


def read_chat_template(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Read the template file that the option ``--chat-template`` names; raises ConfigError."""
    try:
        return ChatTemplate({DEFAULT: _read(path)}, special_tokens, path)
    except ModelLoadError as error:
        raise ConfigError(f"chat_template: {error}") from error


def compile_chat_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Compile a template that a client sent; raises InvalidRequestError if it does not compile.

    Compiling may take any time and memory, so call this only in a process that can be killed.
    """
    try:
        return ChatTemplate({DEFAULT: source}, special_tokens, Path("the request"))
    except ModelLoadError as error:
        raise InvalidRequestError("chat_template", f"is broken: {error}") from error


def _named(value: object) -> dict[str, str]:
    """Return templates by name, from a field that holds one text or a list of named templates."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    if not isinstance(value, dict):
        return {}
    return {n: s for n, s in value.items() if isinstance(n, str) and isinstance(s, str)}


def _in_its_own_json(folder: Path) -> object:
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    return read_object(path).get("chat_template")


def _read(path: Path) -> str:
    try:
        return read_file(path, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"tokenizer: {path} cannot be read: {error}") from error


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that are None, and copy the reasoning to all of `REASONING_FIELDS`."""
    plain = {name: value for name, value in message.items() if value is not None}
    found = [plain[name] for name in REASONING_FIELDS if name in plain]
    if found:
        plain = {"thinking": found[0], **plain, "reasoning_content": found[0]}
    return plain


def with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the ids of tool calls to nine letters and digits, which some templates require.

    A call and its result keep equal ids.
    """
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": [{**c, "id": _short_id(c.get("id"))} for c in calls]}
    return message


def _short_id(call_id: object) -> str:
    text = str(call_id or "")
    if _SHORT_ID.fullmatch(text):
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:9]


class _Generation(jinja2.ext.Extension):
    """Extension of Jinja that accepts ``{% generation %}``, a mark for training, and ignores it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _undeclared(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """List a template's undeclared variables, without computing its constant expressions."""
    finder = jinja2.meta.TrackingCodeGenerator(environment)
    finder.optimizer = None
    finder.visit(environment.parse(source))
    return frozenset(finder.undeclared_identifiers)


# With this decorator, jinja2 calls the function only when rendering, not when compiling.
@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: object) -> object:
    return value


def _environment() -> jinja2.Environment:
    """Make the Jinja environment that Hugging Face's chat templates expect."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        # Constant expressions must not be evaluated while compiling, because nothing limits their
        # cost: `{{ "a" * 10**10 }}` would take that much memory.
        optimized=False,
        finalize=_as_it_is,
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment
