"""Unit tests of the prompt log: prompts are logged only if an option asks for them."""

from __future__ import annotations

import logging

import msgspec
import pytest

from baton.api.outputs import FinishReason, TextDelta
from router.intake.answers.prompt_log import MAX_CHARS, PromptLog
from tests.fakes.router.router_scene import Scene

FIRST = TextDelta("a", 0, (7,), "one ")
LAST = msgspec.structs.replace(
    FIRST, output_index=1, token_ids=(8,), text="two", finish_reason=FinishReason.STOP
)


def test_a_prompt_and_its_output_are_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = PromptLog(None).log_prompt(Scene.make())
    output.note(FIRST)
    assert [record.message for record in caplog.records] == ["prompt"]
    output.note(LAST)
    told = [(one.message, one.request_id, one.text) for one in caplog.records]  # type: ignore[attr-defined]  # extra
    assert told == [("prompt", "a", "[1, 2, 3]"), ("output", "a", "one two")]


def test_long_ones_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = PromptLog(None).log_prompt(Scene.make())
    output.note(msgspec.structs.replace(LAST, text="x" * 3 * MAX_CHARS))
    assert len(caplog.records[-1].text) == MAX_CHARS  # type: ignore[attr-defined]  # extra
