"""Unit tests of Texts: what cannot fit is refused by its size, and no text holds up the loop."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
import tracemalloc
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import InvalidRequestError, ModelLoadError
from baton.text.tokenizer import Tokenizer
from router.intake.texts import MAX_MESSAGES, MAX_TOOLS, SHORT_TEXT_CHARS, ChatPrompt, Texts
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = pytest.mark.medium

TOKENIZER = Tokenizer(DEMO_MODEL)
LONGEST = TOKENIZER.longest_token_chars
# What held the interpreter did so for many seconds.
HELD_UP_S = 1.0


@pytest.fixture(scope="module")
def texts() -> Iterator[Texts]:
    texts = Texts(TOKENIZER, max_model_len=100_000)
    yield texts
    texts.close()


def with_template(folder: Path, template: str) -> Tokenizer:
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Tokenizer(folder)


async def pauses_of(work: Awaitable[Any]) -> list[float]:
    """Return for each turn of the event loop, while some work runs, this process's CPU seconds."""
    pauses, task = list[float](), asyncio.ensure_future(work)
    while not task.done():
        before = time.process_time()
        await asyncio.sleep(0.001)
        pauses.append(time.process_time() - before)
    await task
    return pauses


@pytest.mark.parametrize("num_chars", [1, SHORT_TEXT_CHARS, SHORT_TEXT_CHARS + 1, 50_000])
def test_the_tokens_are_the_same_wherever_they_are_found(texts: Texts, num_chars: int) -> None:
    text = ("def größe(x):\n    return '👩‍🚀' * x\n" * num_chars)[:num_chars]
    found = asyncio.run(texts.encode(text, max_model_len=10**6))
    assert found == TOKENIZER.encode(text)


def test_a_conversation_is_rendered_as_the_template_says(texts: Texts) -> None:
    messages = [{"role": "user", "content": "größe 👩‍🚀\x07"}, {"role": "assistant", "content": ""}]
    found = asyncio.run(texts.encode_chat(ChatPrompt(messages), max_model_len=1000))
    assert found == TOKENIZER.encode_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        '{{ "a" * 10**8 }}',
        '{{ "a"|center(10**8) }}',
        '{% if "a" * 10**8 == "b" %}{% endif %}',
        '{% set a = "a" * 10**8 ~ "b" %}',
        '{% for a in ["a" * 10**8] %}{{ "%100000000d" % 1 }}{% endfor %}',
    ],
)
def test_nothing_of_a_template_is_computed_while_it_is_read(tmp_path: Path, template: str) -> None:
    """Compiling a template once computed its constants without a limit, in router and client."""
    tracemalloc.start()
    try:
        with_template(tmp_path, template)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5e7


def test_a_template_that_is_too_deep_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is broken: maximum recursion depth exceeded"):
        with_template(tmp_path, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}")


def test_a_text_that_cannot_fit_is_refused_by_its_length(texts: Texts) -> None:
    """Regression: the text was tokenized before it was refused, for ten seconds and 2.4 GB."""

    async def main() -> None:
        for text in ("a" * 7_500_000, "a" * (10 * LONGEST + 1)):
            with pytest.raises(
                InvalidRequestError,
                match=rf"^prompt is too long: {math.ceil(len(text) / LONGEST)} tokens > 9 maximum$",
            ):
                await texts.encode(text, max_model_len=10)
        with pytest.raises(InvalidRequestError, match=r"^prompt is too long: 11 tokens > 9 max"):
            await texts.encode_chat(
                ChatPrompt([{"role": "user", "content": "a" * LONGEST}] * 11), max_model_len=10
            )

    asyncio.run(main())


def test_the_longest_text_that_may_fit_is_not_refused(texts: Texts) -> None:
    asyncio.run(texts.encode("a" * (10 * LONGEST), max_model_len=10))


def test_long_texts_do_not_hold_up_the_loop(texts: Texts) -> None:
    """The tokenizer holds the interpreter, on whatever thread it runs."""
    asyncio.run(texts.encode("a" * 5000, max_model_len=10**6))  # the processes are there
    text = "hello world " * 40_000
    pauses = asyncio.run(pauses_of(texts.encode(text, max_model_len=10**6)))
    began_at = time.process_time()
    TOKENIZER.encode(text)
    # A blocked loop makes one turn during the work; on a slow machine, a free loop makes only a
    # few.
    assert len(pauses) >= 3, "the loop waits for the other process"
    assert max(pauses) < HELD_UP_S
    assert max(pauses) < time.process_time() - began_at


def test_texts_that_take_too_much_are_refused_by_field_and_limit() -> None:
    texts = Texts(TOKENIZER, max_model_len=1000)
    with pytest.raises(InvalidRequestError, match=r"^prompt: takes more than 2\.02 s of processor"):
        asyncio.run(texts.encode("👩‍🚀" * 2_000_000, max_model_len=10**6))
    assert asyncio.run(texts.encode("a" * 5000, max_model_len=10**6))
    texts.close()


@pytest.mark.parametrize(
    ("field", "limit", "prompt"),
    [
        ("messages", MAX_MESSAGES, ChatPrompt([{"role": "user", "content": ""}] * 480_000)),
        (
            "tools",
            MAX_TOOLS,
            ChatPrompt([{"role": "user", "content": ""}], tools=[{"type": "function"}] * 1025),
        ),
    ],
)
def test_what_is_too_many_is_refused_by_its_number(
    texts: Texts, field: str, limit: int, prompt: ChatPrompt
) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"^{field}: must have at most {limit}, got \d+$"
    ):
        asyncio.run(texts.encode_chat(prompt, max_model_len=10**6))


def test_tools_and_options_that_are_too_large_are_refused(texts: Texts) -> None:
    messages = [{"role": "user", "content": "x"}]
    for field, prompt in {
        "tools": ChatPrompt(messages, tools=[{"name": "x" * 500_000}]),
        "chat_template_kwargs": ChatPrompt(messages, template_options={"x": "y" * 500_000}),
    }.items():
        with pytest.raises(InvalidRequestError, match=rf"^{field}: and messages must have at most"):
            asyncio.run(texts.encode_chat(prompt, max_model_len=10))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "messages: takes more than",
        ),
        ("{{ messages[0].content * 10 ** 10 }}", "messages: takes more than"),
        ("{{ messages[7].content }}", "chat: the chat template refused it"),
        ("{{ messages | map('upper') | list | tojson }}{{ x.y.z }}", "chat: the chat template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat: the chat template refused it"),
        ("{{ raise_exception('roles must alternate') }}", "chat: .* roles must alternate"),
    ],
)
def test_a_template_that_goes_astray_ends_its_request_alone(
    tmp_path: Path, template: str, problem: str
) -> None:
    texts = Texts(with_template(tmp_path, template), max_model_len=1000)
    prompt = ChatPrompt([{"role": "user", "content": "x"}])

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match=f"^{problem}"):
                await texts.encode_chat(prompt, max_model_len=1000)
        assert await texts.encode("a" * 4001, max_model_len=1000)

    asyncio.run(main())
    texts.close()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"x": "ü", "y": 1}', '{"x": "ü", "y": 1}'),
        ('{"x": "\\ud800"}', '{"x": "\ufffd"}'),
        ("[1]", '{"arguments": [1]}'),
        ('{"x": "a, ', '{"x": "a, "}'),
        ("", "{}"),
    ],
)
def test_a_call_that_was_cut_or_is_wrong_is_shown_to_the_template(
    tmp_path: Path, arguments: str, shown: str
) -> None:
    """Arguments that were no JSON of an object made every later request of a chat an error."""
    call = {"function": {"name": "f", "arguments": arguments}}
    prompt = ChatPrompt([{"role": "assistant", "content": "", "tool_calls": [call]}])
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    texts = Texts(with_template(tmp_path, template), max_model_len=1000)
    found = asyncio.run(texts.encode_chat(prompt, max_model_len=1000))
    texts.close()
    assert TOKENIZER.decode(found) == shown


@pytest.mark.parametrize("num_chars", [1, 5000])
def test_half_a_surrogate_pair_in_a_text_is_refused(texts: Texts, num_chars: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: must be valid Unicode"):
        asyncio.run(texts.encode("a" * num_chars + "\ud800", max_model_len=10_000))
    with pytest.raises(InvalidRequestError, match=r"^messages: must be valid Unicode"):
        asyncio.run(
            texts.encode_chat(
                ChatPrompt([{"role": "user", "content": "\ud800"}]), max_model_len=10_000
            )
        )


def test_a_template_that_the_user_names_is_used_in_the_workers_too(tmp_path: Path) -> None:
    given = tmp_path / "mine.jinja"
    given.write_text("mine: {{ messages[0].content }}", encoding="utf-8")
    texts = Texts(Tokenizer(DEMO_MODEL, chat_template=given), max_model_len=1000)
    try:
        prompt = ChatPrompt([{"role": "user", "content": "hi"}])
        found = asyncio.run(texts.encode_chat(prompt, max_model_len=1000))
    finally:
        texts.close()
    assert found == TOKENIZER.encode("mine: hi")


def test_a_client_that_is_trusted_brings_a_template_for_its_request_alone(texts: Texts) -> None:
    messages = [{"role": "user", "content": "x"}]
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"

    async def main() -> None:
        own = ChatPrompt(messages, template=template)
        assert await texts.encode_chat(own, max_model_len=1000) == TOKENIZER.encode_chat(
            messages, template=template
        )
        plain = await texts.encode_chat(ChatPrompt(messages), max_model_len=1000)
        assert plain == TOKENIZER.encode_chat(messages)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for %}", "chat_template: is broken: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "chat_template: is broken: "),
        ("{% if x %}" * 200 + "{% endif %}" * 200, "chat_template: is broken: "),
        ("{{ 'x' * 10 ** 10 }}", "messages: takes more than"),
        ("{% include 'x' %}", "chat: the chat template refused it"),
        ("{{ ''.__class__.__mro__ }}", "chat: the chat template refused it"),
        ("x" * 1_000_000, "chat_template: and messages must have at most"),
    ],
)
def test_a_template_of_a_client_that_goes_astray_ends_its_request_alone(
    texts: Texts, template: str, problem: str
) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "x"}], template=template)

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match=f"^{problem}"):
            await texts.encode_chat(prompt, max_model_len=10)
        assert await texts.encode_chat(ChatPrompt(prompt.messages), max_model_len=10)

    asyncio.run(main())
