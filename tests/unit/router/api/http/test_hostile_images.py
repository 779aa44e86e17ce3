"""Unit tests of hostile images: each file and URL is one clear line, or odd but fine.

The router's memory stays bounded, its processes for headers come back, and it answers meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import time
from typing import Any

import pytest

from baton.api.errors import ConfigError, InvalidRequestError
from baton.processes.worker_template import resident_memory_bytes
from router.api.images.image_fetch import MAX_FETCHES_OF_CALLER, ImageFetcher
from router.api.images.image_hosts import ImageHosts
from router.intake.images.image_options import ImageOptions
from tests.fakes.outside.hostile_images import hostile_files
from tests.fakes.outside.image_host import PICTURE, ImageHost
from tests.fakes.router.http_scene import HttpScene, on_http

pytestmark = pytest.mark.medium

FILES = hostile_files()
OPTIONS = ImageOptions()
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|169\.254|127\.0\.0\.1")
# A local server would be refused as private, so its network is listed.
LISTED = "127.0.0.0/8, images.example, localhost"
PRIVATE = (
    "127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "192.0.2.1",
    "198.18.0.1", "::1", "::", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "fe80::1", "fc00::1",
    "fd00:ec2::254", "ff02::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
    "2001:db8::1", "fe80::1%lo", "fec0::1", "64:ff9b:1::a00:1", "::7f00:1",
    # IPv6 spellings of 127.0.0.1 and 10.0.0.1: mapped, compatible, translated, of gateways
    "0:0:0:0:0:0:0:1", "0000:0000:0000:0000:0000:0000:0000:0001", "::0.0.0.1", "::127.0.0.1",
    "::FFFF:127.0.0.1", "::ffff:7f00:1", "0:0:0:0:0:FFFF:7F00:0001", "::ffff:0:127.0.0.1",
    "64:FF9B::10.0.0.1", "64:ff9b::0a00:0001", "2002:0a00:0001::1", "2002:a9fe:a9fe::",
    "2001:0:7f00:1::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:4860::5efe:10.0.0.1",
    "2001:4860::200:5efe:7f00:1", "fe80::5efe:127.0.0.1", "::ffff:169.254.169.254",
    "fe80::1%25lo", "fe80::a9fe:a9fe%1", "fd12:3456:789a::1", "fdff:ffff::1", "febf::1", "feff::1",
    "ff05::1:3", "ff0e::1", "100::1", "2001:2::1", "2001:10::1", "3fff::1", "5f00::1", "4000::1",
    "192.88.99.1", "192.0.0.1", "198.51.100.1", "203.0.113.1", "0.1.2.3", "169.254.1.1",
    "172.31.255.255", "100.127.255.255", "239.255.255.255", "198.19.255.255",
)  # fmt: skip
# Other spellings that the system's resolver takes for 127.0.0.1, 0.0.0.0 or 10.0.0.1
NUMBERS = (
    "2130706433", "0x7f000001", "0x7F.1", "017700000001", "0177.0.0.1", "127.1", "127.0.1",
    "127.0x0.00.1", "0", "0x0", "00.0.0.0", "10.1", "167772161", "0xa000001", "012.0.0.1",
    "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]", "[::127.0.0.1]",
    "[::]", "[::ffff:0:127.0.0.1]", "[64:ff9b::127.0.0.1]", "[2002:7f00:1::]", "[fe80::1]",
)  # fmt: skip
UNREADABLE = (
    "", "x", "//a.example/a", "/etc/passwd", "file:///etc/passwd", "ftp://a.example/a", "gopher://a",
    "javascript:alert(1)", "http:a.example", "http:/a.example", "http://", "http:///a", "http://?a",
    "http://a.example\\@127.0.0.1/", "http://user@a.example/", "http://a.example@127.0.0.1/",
    "http://127.0.0.1#@a.example/", "http://a.example\t.b/", "http://a b/",
    "http://a.example\r\nHost: b/", "http://ａ.example/", "http://a。example/", "http://[::1/",
    "http://a.example:99999/", "http://a.example:x/", "http://a.example:-1/", "http://%31/",
    "http://a.example/\0", "blob:http://a.example/1", "http://" + "a" * 3_000, "data", "DATA:,",
    "http://a.example/" + "é",
    # Percent signs and users in hosts
    "http://%61.example/", "http://a%2eexample/", "http://a.example%2f@b.example/",
    "http://a.example%00.b.example/", "http://a.example%40127.0.0.1/", "http://127%2e0%2e0%2e1/",
    "http://%5b::1%5d/", "http://[fe80::1%25lo]/", "http://[fe80::1%lo]/", "http://a.example%23@b/",
    "http://a.example%3f@127.0.0.1/", "http://a.example%5c@127.0.0.1/", "http://a%20.example/",
    "http://a.example:80@127.0.0.1/", "http://a:b@a.example/", "http://@a.example/",
    "http://:@a.example/", "http://a.example@@127.0.0.1/", "http://a.example;@127.0.0.1/",
    "http://a.example&@127.0.0.1#@a.example/", "http://127.0.0.1\\@a.example/",
    "http://a.example;127.0.0.1/", "http://a.example,127.0.0.1/", "http://a.example\\.evil/",
    "http://a.example:80:80/", "http://a.example:+80/", "http://a.example:8_0/", "http://a.example:０/",
    "http:////a.example/", "http:\\\\a.example/", "http:/\\a.example/", "http://\\a.example/",
    "https:a.example", "HTTPS ://a.example/", " http://a.example/", "http://a.example/ ",
    "\thttp://a.example/", "http\n://a.example/", "http://a.exa\nmple/", "http://a.example/#x\r\n",
    "http://[a.example]/", "http://[127.0.0.1]/", "http://[::1]a.example/", "http://::1/",
    "http://[::1]]/", "http://[[::1]]/", "http://[]/",
    "http://\u2488\u2488/", "http://\u24c1ocalhost/", "http://a\u00ad.example/", "http://a\u200b.example/",
    "http://1\uff0e1\uff0e1\uff0e1/", "http://a\u2024example/", "http://\u0430.example/",
    "view-source:http://a.example/", "url:http://a.example/", "jar:http://a.example!/a",
    "dict://a.example:11211/", "ldap://a.example/", "tftp://a.example/", "netdoc:///etc/passwd",
    "unix:///run/x.sock", "http+unix://%2frun%2fx.sock/", "phar://a", "expect://id", "php://input",
)  # fmt: skip
NO_BASE64 = "no valid base64"
# Data URLs with odd parameters; most clients send none.
DATA_URLS = {
    "data:image/png;charset=utf-8;base64,{}": "", "DATA:IMAGE/PNG;BASE64,{}": "",
    "data:image/png; base64,{}": "", "data:image/svg+xml;base64,{}": "",  # the content decides
    "data:image/png;name=a.png;base64,{}": "", "data:image/png;base64;base64,{}": "",
    "data:image/;base64,{}": "", "data:image/png;x=\";base64,{}": "",
    "data:;base64,{}": "must be a URL of the form", "data:text/html;base64,{}": "of the form",
    "data:image/png,{}": "of the form", "data:image/png;base64{}": "of the form",
    "data:image/png;base64;x=1,{}": "of the form", "data:application/pdf;base64,{}": "of the form",
    "data:image/png;base65,{}": "of the form", "data://image/png;base64,{}": "of the form",
    "data:image/png;%62ase64,{}": "of the form", "data:\timage/png;base64,{}": "of the form",
    "data:image/png;" + "x=y;" * 40 + "base64,{}": "of the form",
    "data:image/png;base64,,{}": NO_BASE64, "data:image/png;base64,data:{}": NO_BASE64,
    "data:image/png;base64, {}": NO_BASE64, "data:image/png;base64,{}\n": NO_BASE64,
    "data:image/png;base64,{}=": NO_BASE64, "data:image/png;base64,{}#x": NO_BASE64,
    "data:image/png;base64,{}?x": NO_BASE64, "data:image/png;base64,%69{}": NO_BASE64,
    "data:image/png;base64,é{}": NO_BASE64, "data:image/png;base64,-_{}": NO_BASE64,
    "data:image/png;base64,": "at least 1 byte", "data:image/png;base64,=": NO_BASE64,
    "data:image/png;base64,\0{}": NO_BASE64,
}  # fmt: skip
UNLISTED = (
    "http://other.example/", "http://images.example.evil.example/", "http://evilimages.example/",
    "http://images.example:8080/", "https://sub.images.example/", "http://0x7f.1/", "http://2130706433/",
    "http://0177.0.0.1/", "http://127.1/", "http://[::1]/", "http://10.0.0.1/", "http://8.8.8.8/",
    "http://[::ffff:127.0.0.1.]/", "http://metadata.google.internal/", "http://images.example./", "http://localhost:22/",
)  # fmt: skip


def chat(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_there_are_200_cases() -> None:
    urls = (*PRIVATE, *NUMBERS, *UNREADABLE, *UNLISTED, *DATA_URLS)
    assert len(FILES) >= 300
    assert len(urls) >= 200
    assert len({case.name for case in FILES}) == len(FILES)


@on_http(images=OPTIONS, encodes_images=True, max_model_len=10**6)
async def test_every_file_is_decided_in_one_line_while_the_router_answers(scene: HttpScene) -> None:
    slowest_cpu_s = 0.0

    async def ask_health() -> None:
        nonlocal slowest_cpu_s
        while True:
            began_at = time.thread_time()  # only the router's time
            async with asyncio.timeout(10), scene.session.get(f"{scene.url}/health") as response:
                assert response.status == 200
            slowest_cpu_s = max(slowest_cpu_s, time.thread_time() - began_at)
            await asyncio.sleep(0.005)

    await scene.post("/tokenize", messages=chat(_data_url(PICTURE)))
    before_bytes, asking = resident_memory_bytes(), asyncio.create_task(ask_health())
    wrong: list[tuple[str, object, str]] = []
    for case in FILES:
        reply = await scene.post("/tokenize", messages=chat(_data_url(case.data)))
        answer = await reply.json()
        message = "" if reply.status == 200 else answer["error"]["message"]
        if message and not is_clear(message, reply.status):
            wrong.append((case.name, reply.status, message))
        elif case.error != "?" and (bool(message) != bool(case.error) or case.error not in message):
            wrong.append((case.name, case.error, message))
    assert not wrong
    assert not asking.done()
    asking.cancel()
    assert slowest_cpu_s < 1.0
    assert resident_memory_bytes() - before_bytes < 200 * 2**20


def is_clear(message: str, status: int) -> bool:
    """Return whether an error is one short line that names the field and shows no address."""
    is_line = message.startswith("messages[0].content[0]: ") and "\n" not in message
    return status == 400 and is_line and len(message) < 200 and not _ADDRESS.search(message)


def _data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(InvalidRequestError) as found:
        await fetcher.fetch(url, "image")
    message = str(found.value)
    assert "\n" not in message
    assert not _ADDRESS.search(message)
    return message


def test_no_url_is_read_in_two_ways_and_only_listed_hosts_are_asked() -> None:
    async def run() -> None:
        fetcher = ImageFetcher(ImageOptions(image_hosts="images.example, a.example, localhost"))
        for url in UNREADABLE:
            message = await refusal(fetcher, url)
            assert "must be a data URL" in message or "is no URL" in message, (url, message)
        for url in UNLISTED:
            assert "is not listed" in await refusal(fetcher, url), url

    asyncio.run(run())


def test_addresses_in_other_spellings_are_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        """Read numbers as the system's resolver does, and ask no server for names."""
        if ":" in host:
            return [(10, 1, 6, "", (host, port, 0, 0))]
        return [(2, 1, 6, "", (socket.inet_ntoa(socket.inet_aton(host)), port))]

    async def run() -> None:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        fetcher = ImageFetcher(ImageOptions(image_hosts="*"))
        for host in NUMBERS:
            message = await refusal(fetcher, f"http://{host}/")
            assert "not public" in message or "is no URL" in message, (host, message)

    asyncio.run(run())


@on_http(images=OPTIONS, encodes_images=True)
async def test_parameters_of_data_urls(scene: HttpScene) -> None:
    wrong: list[tuple[str, str, str]] = []
    content = base64.b64encode(PICTURE).decode()
    for form, error in DATA_URLS.items():
        reply = await scene.post("/tokenize", messages=chat(form.replace("{}", content)))
        answer = await reply.json()
        message = "" if reply.status == 200 else answer["error"]["message"]
        is_line = not message or is_clear(message, reply.status) or "image_url" in message
        if bool(message) != bool(error) or error not in message or not is_line:
            wrong.append((form, error, message))
    assert not wrong


@pytest.mark.parametrize("address", PRIVATE)
def test_a_listed_name_with_a_private_address_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        _resolve_to(monkeypatch, ["93.184.216.34", address])  # one private address is enough
        fetcher = ImageFetcher(ImageOptions(image_hosts="images.example, *"))
        assert "not public" in await refusal(fetcher, "http://images.example/a.png")

    asyncio.run(run())


def _resolve_to(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(2, 1, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_is_resolved_once_and_the_connection_goes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with ImageHost().running() as host:
            fetcher = ImageFetcher(
                ImageOptions(image_hosts=f"images.example:{host.port}, 127.0.0.0/8")
            )
            _resolve_to(monkeypatch, ["127.0.0.1"])
            url = f"http://images.example:{host.port}/a.png"
            assert await fetcher.fetch(url, "image") == PICTURE

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "error"),
    [
        *((f"/redirect/{code}", f"answered with {code}") for code in (301, 302, 303, 307, 308)),
        *((f"/status/{code}", f"answered with {code}") for code in (204, 206, 404, 500)),
        ("/gzip", "compressed answer"),
        ("/endless", "at most 50000 bytes"),
        ("/large", "at most 50000 bytes together, got 100000"),
        ("/empty", "at least 1 byte"),
        ("/short", "could not be fetched"),
        ("/slow", "did not come within 0.3 s"),
    ],
)
def test_a_host_that_misbehaves_is_cut_off(path: str, error: str) -> None:
    async def run() -> None:
        async with ImageHost().running() as host:
            options = ImageOptions(
                image_hosts=f"localhost:{host.port}, 127.0.0.0/8, ::1",
                max_image_bytes=50_000,
                image_timeout_s=0.3 if path == "/slow" else 10,
            )
            url = f"http://localhost:{host.port}{path}"
            assert error in await refusal(ImageFetcher(options), url)
            assert host.paths == [path]  # no redirect was followed
            assert host.num_sent < 2**24

    asyncio.run(run())


def test_hosts_that_never_answer_delay_only_their_own_tenant() -> None:
    async def run() -> None:
        async with ImageHost().running() as host:
            listed = f"localhost:{host.port}, 127.0.0.0/8, ::1"
            fetcher = ImageFetcher(ImageOptions(image_hosts=listed, image_timeout_s=5))
            url = f"http://localhost:{host.port}"
            slow = [
                asyncio.create_task(fetcher.fetch(f"{url}/slow", "image", caller="a"))
                for _ in range(20)
            ]
            while host.paths.count("/slow") < MAX_FETCHES_OF_CALLER:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await fetcher.fetch(f"{url}/a.png", "image", caller="b") == PICTURE
            assert host.paths.count("/slow") == MAX_FETCHES_OF_CALLER
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(run())


def test_a_fetched_image_is_like_one_in_the_request() -> None:
    async def run() -> None:
        async with ImageHost().running() as host:
            options = ImageOptions(image_hosts=f"127.0.0.1:{host.port}, 127.0.0.1")
            scene = HttpScene(images=options, encodes_images=True)
            async with scene.running():
                url = f"http://127.0.0.1:{host.port}"
                scene.post("/v1/chat/completions", messages=chat(f"{url}/a.png"))
                (image,) = (await scene.command()).images
                assert image.data == PICTURE
                response = await scene.post("/tokenize", messages=chat(f"{url}/page"))
                error = (await response.json())["error"]["message"]
                assert error.endswith("must be a whole PNG, JPEG, WEBP or GIF file")

    asyncio.run(run())


@pytest.mark.parametrize("listed", ["http://a", "a/b", "a b", "user@a", "a:x", "[::1", "a:99999"])
def test_an_entry_that_is_no_host_is_refused_at_the_start(listed: str) -> None:
    with pytest.raises(ConfigError, match="image_hosts: must be hosts, HOST:PORT or networks"):
        ImageHosts(listed)
