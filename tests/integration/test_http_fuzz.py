"""Bodies made from the HTTP API's own schema, and broken ones, against a router (schemathesis).

The nodes are simulated ones, so that an example costs milliseconds. Nothing that a client sends may
be an error of the server, and none may leave anything open.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from baton import Client, SamplingParams
from baton.processes.free_address import free_address
from router.api.anthropic_messages.request import CountTokensRequest, MessagesRequest
from router.api.http.schema import ChatRequest, CompletionRequest
from router.api.http.tokenization import DetokenizeRequest, TokenizeRequest
from router.api.openai_responses.request import ResponsesRequest
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S
from tests.property.num_examples import num_examples

pytestmark = pytest.mark.large

ROOT = Path(__file__).parents[2]
MODEL = "demo"
# What a client is told of what it sent, and what it may be told of the nodes.
ANSWERS = {200, 400, 404, 413, 415, 429, 503, 504}


# Path -> what decodes its bodies, and how many of these are tried.
BODIES: dict[str, tuple[type, int]] = {
    "/v1/chat/completions": (ChatRequest, 60),
    "/v1/completions": (CompletionRequest, 60),
    "/v1/responses": (ResponsesRequest, 30),
    "/v1/messages": (MessagesRequest, 30),
    "/v1/messages/count_tokens": (CountTokensRequest, 10),
    "/tokenize": (TokenizeRequest, 20),
    "/detokenize": (DetokenizeRequest, 10),
}


def openapi() -> dict[str, Any]:
    """Describe the paths that take bodies, from the structs that decode them."""
    kinds = [kind for kind, _ in BODIES.values()]
    references, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for name in (kind.__name__ for kind in kinds):
        properties = components[name]["properties"]
        properties["model"] = {"const": MODEL}
        # Fields that nobody knows: their names come back in a header and go into the log.
        components[name]["additionalProperties"] = True
        for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if properties.pop(limit, None) and limit != "max_completion_tokens":
                properties[limit] = {"type": "integer", "minimum": -1, "maximum": 9}
    paths = zip(BODIES, references, strict=True)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1"},
        "paths": {
            path: {
                "post": {
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": reference}},
                    },
                    "responses": {"200": {"description": "a completion"}},
                }
            }
            for path, reference in paths
        },
        "components": {"schemas": components},
    }


SCHEMA = schemathesis.openapi.from_dict(openapi())


def wait_until_ready(url: str) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at:
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{url}/ready", timeout=5).ok:
                return
        time.sleep(0.05)
    raise TimeoutError(f"{url} is not ready")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The HTTP address of a router with one simulated pair."""
    grpc, http = free_address(), free_address()
    baton = [sys.executable, "-m", "baton"]
    model = ["--model", str(DEMO_MODEL)]
    router = [*baton, "router", *model, "--listen", grpc, "--http-listen", http]
    nodes = [*baton, "sim-node", *model, "--router", grpc, "--time-scale", "0.01"]
    processes = [
        subprocess.Popen([*router, "--served-model-name", MODEL], cwd=ROOT),
        subprocess.Popen(nodes, cwd=ROOT),
    ]
    try:
        wait_until_ready(f"http://{http}")
        with Client(grpc) as client:
            yield f"http://{http}"
            assert [process.poll() for process in processes] == [None, None]
            client.generate("it still serves", SamplingParams(max_tokens=3))
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=30)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", list(BODIES))
def test_no_body_is_an_error_of_the_server(url: str, path: str, mode: GenerationMode) -> None:
    cases = SCHEMA[path]["POST"].as_strategy(generation_mode=mode)
    session = requests.Session()

    @settings(
        max_examples=num_examples(BODIES[path][1]),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, extra=st.sampled_from(["", "Content-Encoding", "X-Session-Id"]))
    def check(case: Any, extra: str) -> None:
        if extra:
            case.headers = {**(case.headers or {}), extra: "gzip"}
        began = time.monotonic()
        response = case.call(base_url=url, session=session, timeout=30)
        assert response.status_code in ANSWERS, (response.status_code, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"]
        assert session.get(f"{url}/health", timeout=10).status_code == 200
        assert time.monotonic() - began < 20

    check()
    assert session.get(f"{url}/health", timeout=10).text == "ok\n"


@settings(max_examples=num_examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=300), path=st.text(max_size=20))
def test_no_bytes_on_any_path_are_an_error_of_the_server(url: str, body: bytes, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    for target in ("/v1/completions", "/" + urllib.parse.quote(path)):
        response = requests.post(url + target, data=body, headers=headers, timeout=30)
        assert response.status_code in {*ANSWERS, 401, 403, 405} - {200}, response.text
