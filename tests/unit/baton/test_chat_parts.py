"""Unit tests of conversations with images: contents with parts, for templates of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.text.chat_template import ChatTemplate
from baton.text.continued_message import up_to_mark, with_last_marked
from baton.text.tool_prompt import with_tools

PARTS_ONLY = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% else %}<image>{% endif %}{% endfor %};{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endif %};{% endfor %}"
)
TEXTS_ONLY = "{% for m in messages %}{{ m.content }};{% endfor %}"
REFUSING = "{{ raise_exception('no') }}"
IMAGE: dict[str, Any] = {"type": "image"}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {}, Path("here"))


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("source", "reads_parts_only"),
    [(PARTS_ONLY, True), (BOTH, False), (TEXTS_ONLY, False), (REFUSING, False)],
)
def test_a_template_is_tried_for_the_contents_that_it_shows(
    source: str, reads_parts_only: bool
) -> None:
    assert template(source).reads_parts_only is reads_parts_only


@pytest.mark.parametrize("source", [PARTS_ONLY, BOTH])
def test_texts_and_parts_are_shown(source: str) -> None:
    made = template(source)
    assert made.render(user("hello")) == "hello;"
    parts = [{"type": "text", "text": "a "}, IMAGE, {"type": "text", "text": " b"}]
    assert made.render(user(parts)) == "a <image> b;"


@pytest.mark.parametrize("source", [PARTS_ONLY, BOTH])
def test_a_prompt_may_end_inside_a_message_with_an_image(source: str) -> None:
    (marked,) = with_last_marked(user([{"type": "text", "text": "a "}, IMAGE]))
    assert up_to_mark(template(source).render(marked)) == "a <image>"


def test_tools_are_told_before_the_images_of_the_first_message() -> None:
    (message,) = with_tools(user([IMAGE]), [{"type": "function"}], in_system_message=False)
    text, image = message["content"]
    assert "<tools>" in text["text"]
    assert image == IMAGE
