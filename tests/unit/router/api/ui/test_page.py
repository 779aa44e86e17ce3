"""Unit tests of the status page: who may look, what it shows, and that it trusts nobody's words."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
import shlex

import pytest
from yarl import URL

from baton.access.access import Access
from baton.api.outputs import FinishReason
from baton.link.words import NodeBeat, NodeRole, ServingState
from tests.fakes.router.http_scene import HttpScene, on_http
from tests.fakes.router.nodes import HandNode, make_registration

pytestmark = pytest.mark.medium

HOSTILE = "<script>alert(1)</script>"


async def page(scene: HttpScene, path: str = "/ui") -> str:
    async with scene.session.get(scene.url + path) as response:
        text = await response.text()
        assert response.status == 200, text
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["Cache-Control"] == "no-store"
        return text


def basic(key: str) -> dict[str, str]:
    """The header that a browser sends when somebody typed a name and a password."""
    return {"Authorization": f"Basic {base64.b64encode(f'me:{key}'.encode()).decode()}"}


@on_http()
async def test_it_shows_nodes_pairs_requests_and_the_life_of_one(scene: HttpScene) -> None:
    reply = scene.post(prompt="def add", max_tokens=9)
    command = await scene.command()
    scene.pool.on_event(scene.decode.node, NodeBeat(num_running=1, num_free_blocks=4))
    shown = await page(scene)
    for words in ("d0", "p0", ">running<", "60%", "KV in use: 60%"):
        assert words in shown
    scene.say(command, 0, "def add(a, b): return", last=FinishReason.LENGTH)
    request_id = (await reply).headers["X-Request-Id"]
    scene.page.history.note()
    shown = await page(scene)
    assert ">finished<" in shown
    assert f'href="/ui/requests/{request_id}?tenant="' in shown
    one = await page(scene, f"/ui/requests/{request_id}")
    for words in ("waits at the router", "prompt", "decodes", "p0 → d0", "1 blocks"):
        assert words in one


@on_http(pair=False)
async def test_it_says_why_it_is_not_ready_and_is_whole_without_nodes(scene: HttpScene) -> None:
    shown = await page(scene)
    assert "not ready" in shown
    assert "no prefill node has joined the router" in shown
    assert "No node has joined." in shown
    assert "No request has come yet." in shown


@on_http()
async def test_a_page_without_requests_has_a_command_that_works(scene: HttpScene) -> None:
    found = re.search(r"<pre><code>(.*?)</code></pre>", await page(scene), re.DOTALL)
    assert found is not None
    words = shlex.split(html.unescape(found[1]).replace("\\\n", " "))
    assert words[:2] == ["curl", f"{scene.url}/v1/chat/completions"]
    assert words[2:4] == ["-H", "Content-Type: application/json"]
    body = json.loads(words[words.index("-d") + 1])
    async with scene.session.get(f"{scene.url}/v1/models") as response:
        models = await response.json()
    assert body["model"] == models["data"][0]["id"]
    assert body["messages"][0]["role"] == "user"


@on_http(access=Access(admin_token="right", node_token="node"))
async def test_the_command_brings_a_key_where_the_reader_had_to(scene: HttpScene) -> None:
    async with scene.session.get(scene.url + "/ui", headers=basic("right")) as response:
        shown = html.unescape(await response.text())
    assert '-H "Authorization: Bearer $BATON_API_KEY"' in shown
    assert "right" not in shown


@on_http()
async def test_drains_lost_nodes_and_revisions_are_told(scene: HttpScene) -> None:
    HandNode(scene.pool, make_registration("p9", NodeRole.PREFILL, differs={"revision": "v2"}))
    lost = make_registration("d9", NodeRole.DECODE)
    scene.pool.lost_nodes.note_missing(lost)
    beat = NodeBeat(serving_state=ServingState.DRAINING, num_transfers=3)
    scene.pool.on_event(scene.decode.node, beat)
    shown = await page(scene)
    for words in ("incomplete", "v2", "fell silent", "is draining", "3 transfers"):
        assert words in shown


@on_http()
async def test_what_others_say_is_text_and_nothing_else(scene: HttpScene) -> None:
    registration = make_registration("p8", NodeRole.PREFILL, differs={"revision": HOSTILE})
    HandNode(scene.pool, dataclasses.replace(registration, node_name=HOSTILE))
    scene.headers = {"X-Request-Id": HOSTILE}
    reply = scene.post()
    command = await scene.command()
    scene.fail(command, "INVALID_ARGUMENT", HOSTILE)
    await reply
    shown = await page(scene)
    assert HOSTILE not in shown
    assert shown.count("&lt;script&gt;") >= 3
    assert HOSTILE not in await page(scene, f"/ui/requests/{HOSTILE.replace('/', '%2F')}")


@on_http()
async def test_a_request_whose_id_is_of_odd_characters_has_a_page(scene: HttpScene) -> None:
    scene.headers = {"X-Request-Id": "{a}/b?c#d%"}
    reply = scene.post()
    scene.fail(await scene.command(), "INVALID_ARGUMENT", "no")
    await reply
    found = re.search(r'href="(/ui/requests/[^"?]+)', await page(scene))
    assert found is not None
    url = URL(scene.url + found[1], encoded=True)
    async with scene.session.get(url) as response:
        assert response.status == 200


@on_http()
async def test_a_request_that_is_not_known_is_not_found(scene: HttpScene) -> None:
    async with scene.session.get(f"{scene.url}/ui/requests/none") as response:
        assert response.status == 404
    async with scene.session.get(f"{scene.url}/ui/ui.py") as response:
        assert response.status == 404


@on_http(access=Access(admin_token="right", node_token="node"))
async def test_a_browser_is_asked_for_a_key_and_the_key_must_be_an_operators(
    scene: HttpScene,
) -> None:
    for path in ("/ui", "/ui/requests/x"):
        async with scene.session.get(scene.url + path) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"].startswith("Basic ")
        for key, status in (("wrong", 401), ("node", 403)):
            async with scene.session.get(scene.url + path, headers=basic(key)) as response:
                assert response.status == status
    for headers in (basic("right"), {"Authorization": "Bearer right"}):
        async with scene.session.get(f"{scene.url}/ui", headers=headers) as response:
            assert response.status == 200
    # Passwords are for pages: what changes something wants a header that no browser sends itself.
    async with scene.session.get(f"{scene.url}/metrics", headers=basic("right")) as response:
        assert response.status == 401


@on_http(access=Access(admin_token="right"))
async def test_what_it_is_drawn_with_is_open(scene: HttpScene) -> None:
    for name, kind in (("ui.css", "text/css"), ("ui.js", "text/javascript")):
        async with scene.session.get(f"{scene.url}/ui/{name}") as response:
            assert response.status == 200
            assert response.content_type == kind


@on_http(access=Access(admin_token="right"))
async def test_whoever_opens_the_servers_address_is_sent_to_the_page(scene: HttpScene) -> None:
    """Regression: the address that a start prints was 404 in a browser."""
    async with scene.session.get(f"{scene.url}/", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, "/ui")
    async with scene.session.get(f"{scene.url}/", headers=basic("right")) as response:
        assert (response.status, response.url.path) == (200, "/ui")
        assert "html" in response.headers["Content-Type"]
