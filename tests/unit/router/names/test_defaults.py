"""Unit tests of served names: several names of one model, with defaults of their own."""

from __future__ import annotations

import pytest

from baton.api.errors import ConfigError
from baton.api.outputs import FinishReason
from router.names.defaults import NameDefaults, read_defaults, read_names
from tests.fakes.router.http_scene import HttpScene, on_http

NAMES = ("demo", "claude:opus")


def test_names_are_the_first_and_others_that_differ() -> None:
    assert read_names("a/b", "") == ("a/b",)
    assert read_names("a", " b, c:8b ,a,,b") == ("a", "b", "c:8b")


def test_defaults_are_of_all_names_or_of_one() -> None:
    text = "temperature=0.7, max_tokens=100; claude:opus:temperature=0,top_k=20,max_tokens_limit=9"
    found = read_defaults(NAMES, text)
    assert found["demo"] == NameDefaults(sampling={"temperature": 0.7}, max_tokens=100)
    sampling = {"temperature": 0.0, "top_k": 20}
    assert found["claude:opus"] == NameDefaults(
        sampling=sampling, max_tokens=100, max_tokens_limit=9
    )
    assert read_defaults(NAMES, "") == {"demo": NameDefaults(), "claude:opus": NameDefaults()}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("other:temperature=1", "must be NAME:key=value with a served NAME, got 'other:temp"),
        ("temperature", "must be NAME:key=value"),
        ("seed=1", "must have keys of temperature"),
        ("temperature=hot", "temperature must be a number, got 'hot'"),
        ("temperature=-1", "temperature: must be 0 or more"),
        ("max_tokens=0", "max_tokens: must be 1 or more"),
        ("max_tokens=1.5", "max_tokens must be a number, got '1.5'"),
    ],
)
def test_defaults_that_cannot_be_are_refused_at_the_start(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"request_defaults: {problem}"):
        read_defaults(NAMES, text)


def test_a_limit_holds_whatever_a_request_says() -> None:
    limited = NameDefaults(max_tokens=50, max_tokens_limit=80)
    assert [limited.num_tokens(asked, 1000) for asked in (None, 20, 80, 1000)] == [50, 20, 80, 80]
    assert NameDefaults(max_tokens_limit=80).num_tokens(None, 1000) == 80
    assert NameDefaults().num_tokens(None, 1000) == 1000


@pytest.mark.medium
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
)
def test_a_request_has_the_defaults_of_the_name_that_it_calls_the_model(path: str) -> None:
    """A chat without max_tokens could fill the model's length, whatever an operator wished."""
    defaults = read_defaults(NAMES, "temperature=0.7,max_tokens=30;claude:opus:max_tokens_limit=7")

    @on_http(served=defaults)
    async def run(scene: HttpScene) -> None:
        messages = [{"role": "user", "content": "x"}]
        asked = {"/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x"}}.get(
            path, {"messages": messages}
        )
        needed = {"max_tokens": 60} if path == "/v1/messages" else {}
        for number, (model, wanted) in enumerate({"demo": 30, "claude:opus": 7}.items(), 1):
            reply = scene.post(path, **{**asked, **needed, "model": model})
            command = await scene.command(number)
            params = command.sampling_params
            assert params.temperature == 0.7
            assert params.max_tokens == (60 if needed and model == "demo" else wanted)
            scene.say(command, 0, "x", last=FinishReason.STOP)
            body = await (await reply).json()
            assert body["model"] == model
        response = await scene.post(path, **{**asked, **needed, "model": "other"})
        assert response.status == 404

    run()


@pytest.mark.medium
@on_http(served=read_defaults(NAMES, ""))
async def test_each_name_is_listed(scene: HttpScene) -> None:
    async with scene.session.get(f"{scene.url}/v1/models") as response:
        listed = [model["id"] for model in (await response.json())["data"]]
    assert listed == list(NAMES)
    async with scene.session.get(f"{scene.url}/v1/models/claude:opus") as response:
        assert (await response.json())["id"] == "claude:opus"
