"""Unit tests of who calls over HTTP: sessions, priorities, API keys."""

from __future__ import annotations

from typing import Any

from baton.outputs import FinishReason
from tests.fakes.http_scene import HttpScene, on_http


@on_http()
async def test_session_and_priority_reach_the_call_from_body_or_header(scene: HttpScene) -> None:
    bodies: list[dict[str, Any]] = [{"user": "me"}, {"priority": -3}, {"session_id": "of body"}]
    for number, body in enumerate(bodies):
        scene.headers = {"X-Session-Id": "of header"} if number else {}
        reply = scene.post(**body)
        scene.say(await scene.command(number + 1), 0, "x", last=FinishReason.STOP)
        assert (await reply).status == 200
    assert [(call.session_id, call.priority) for call in scene.dispatcher.calls] == [
        ("", 0),
        ("of header", -3),
        ("of body", 0),
    ]
