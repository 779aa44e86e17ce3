"""The access log: one line for each request of a client, over both APIs, and no secret in it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from baton.access.access import Access
from baton.access.api_keys import draw_key, entry_text
from baton.access.identity import ANYBODY, Principal
from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from baton.serving.access_log import AccessEntry, AccessLog
from tests.fakes.router.grpc_scene import params, served
from tests.fakes.router.http_scene import HttpScene, on_http
from tests.fakes.router.router_scene import asynchronous

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
ON = AccessLog("demo", is_on=True)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.serving.access_log")


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines' fields, with their messages."""
    records = [record for record in caplog.records if record.name == "baton.serving.access_log"]
    return [{**vars(record), "message": record.getMessage()} for record in records]


@on_http(access_log=ON)
async def over_http(scene: HttpScene) -> None:
    scene.headers = {"X-Request-Id": "mine", "traceparent": TRACEPARENT}
    reply = scene.post(stream=True, n=2)
    for number in (1, 2):
        scene.say(await scene.command(number), 0, "def", last=FinishReason.STOP)
    await (await reply).read()
    scene.headers = {}
    await (await scene.post(max_tokens=-1)).read()
    for path in ("/health", "/metrics"):
        async with scene.session.get(scene.url + path) as response:
            assert response.status == 200


@pytest.mark.medium
def test_a_request_over_http_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    over_http()
    good, wrong = told(caplog)
    assert good["message"] == "POST /v1/completions 200"
    assert (good["request_id"], good["trace_id"], good["model"]) == ("mine", TRACE, "demo")
    assert (good["prompt_tokens"], good["status"], good["error"]) == (1, "200", None)
    assert good["output_tokens"] >= 2
    assert 0 < good["ttft_s"] <= good["duration_s"]
    assert good["address"] == "127.0.0.1"
    assert (wrong["message"], wrong["ttft_s"]) == ("POST /v1/completions 400", None)
    assert len(wrong["request_id"]) == 32


def test_a_request_over_grpc_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    @asynchronous
    async def run() -> None:
        async with served(access_log=ON) as (_, client):
            async for _ in client.stream([1, 2, 3], params(), request_id="mine"):
                pass
            with pytest.raises(InvalidRequestError):
                async for _ in client.stream([1, 2, 3], params(), request_id="x" * 1000):
                    pass

    run()
    good, wrong = told(caplog)
    assert good["message"] == "/baton.v1.Inference/Generate OK"
    assert (good["request_id"], good["prompt_tokens"], good["output_tokens"]) == ("mine", 3, 8)
    assert 0 < good["ttft_s"] <= good["duration_s"]
    assert wrong["message"] == "/baton.v1.Inference/Generate INVALID_ARGUMENT"
    assert wrong["request_id"] == "x" * 128


@pytest.mark.medium
def test_the_key_s_name_is_told_and_the_key_is_not(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key, file = draw_key(), tmp_path / "keys.toml"
    file.write_text(entry_text(key, "alice", tenant="search", roles=["infer"]), encoding="utf-8")

    @on_http(access_log=ON, access=Access(keys_file=file))
    async def run(scene: HttpScene) -> None:
        for bearer in (key, f"{key}x"):
            scene.headers = {"Authorization": f"Bearer {bearer}"}
            await (await scene.post(max_tokens=-1)).read()

    run()
    [line] = told(caplog)  # of who is unknown the audit log tells
    assert (line["key"], line["tenant"], line["status"]) == ("alice", "search", "400")
    assert key not in str(line)


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    AccessLog("demo", is_on=False).write(AccessEntry(call="x"), ANYBODY, "OK")
    AccessLog("demo", is_on=True).write(AccessEntry(call="x"), None, "401")
    assert told(caplog) == []
    AccessLog("demo", is_on=True).write(AccessEntry(call="y" * 9999), Principal(name="a"), "OK")
    assert told(caplog)[0]["message"] == "y" * 100 + " OK"
