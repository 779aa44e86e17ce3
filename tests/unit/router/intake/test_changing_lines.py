"""Unit tests of changing lines: each prompt of a client begins with what stays the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from baton.api.outputs import FinishReason
from router.intake.changing_lines import without_changing_lines
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, on_http

LINE = "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=cli; cch={};"
USER: Mapping[str, Any] = {"role": "user", "content": f"{LINE}\nx"}


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (f"{LINE}\nYou are.", "You are."),
        ("You are.", "You are."),
        (f"You are.\n{LINE}", f"You are.\n{LINE}"),
        (LINE, None),
        ("", ""),
    ],
)
def test_a_line_at_the_beginning_of_a_system_message_is_cut(content: str, kept: str | None) -> None:
    found = without_changing_lines([{"role": "system", "content": content}, USER])
    assert found[-1] == USER
    assert [message["content"] for message in found[:-1]] == ([] if kept is None else [kept])


@pytest.mark.medium
def test_two_requests_of_claude_code_have_one_prompt() -> None:
    """Regression: each prompt began with a changing hash, so the prefix cache never hit."""

    @on_http(max_model_len=2000)
    async def run(scene: HttpScene) -> None:
        prompts = []
        for number in (1, 2):
            system = [
                {"type": "text", "text": LINE.format(number)},
                {"type": "text", "text": "You are Claude Code."},
            ]
            messages = [{"role": "user", "content": "x"}]
            reply = scene.post("/v1/messages", system=system, messages=messages, max_tokens=5)
            command = await scene.command(number)
            prompts.append(command.prompt_token_ids)
            scene.say(command, 0, "x", last=FinishReason.STOP)
            assert (await reply).status == 200
        assert prompts[0] == prompts[1]
        assert "You are Claude Code." in TOKENIZER.decode(prompts[0])

    run()
