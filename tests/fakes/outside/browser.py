"""A real headless browser: returns the page that a file gives, and the browser's complaints."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--enable-logging=stderr",
    "--window-size=1100,3000",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenedPage:
    """A page that a browser opened from the disk.

    Attributes:
        dom: the document after loading, as HTML.
        complaints: lines of the browser's console.
    """

    dom: str
    complaints: list[str]


def open_page(path: Path, profile: Path) -> OpenedPage:
    """Open a file from the disk.

    Args:
        profile: an empty folder, for the browser alone.
    """
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return OpenedPage(done.stdout, complaints)


@dataclass(frozen=True, slots=True)
class SeenPage:
    """A page as a browser shows it.

    Attributes:
        overflowing: elements that reach beyond the right edge, by tag and text; none should.
        pictures: addresses of the pictures that the browser chose.
        picture: a PNG of the whole page.
        complaints: errors and warnings in the browser's console.
        text: the visible text.
        found: the value that ``script`` returned.
    """

    overflowing: list[str]
    pictures: list[str]
    picture: bytes
    complaints: list[str]
    text: str
    found: Any = None


_OVERFLOWING = """[...document.querySelectorAll("body *")].filter(one =>
  !one.closest("pre") && one.getBoundingClientRect().right > innerWidth + 0.5
).map(one => one.tagName + " " + one.textContent.slice(0, 40))"""
_PICTURES = """[...document.images].map(one => one.currentSrc)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """The way to look at a page.

    Attributes:
        url: the page's URL.
        width: the screen's width, in pixels.
        authorization: header of every request; empty: none.
        scripts: whether pages may run any.
        script: run at the end; what it gives, or promises, is `SeenPage.found`.
    """

    url: str
    width: int
    is_dark: bool
    authorization: str = ""
    scripts: bool = True
    script: str = ""


def look_at_page(path: Path, profile: Path, *, width: int, is_dark: bool) -> SeenPage:
    """A file from the disk on a screen of so many pixels, in the light or in the dark."""
    return look(Glance(url=path.as_uri(), width=width, is_dark=is_dark), profile)


def look(glance: Glance, profile: Path) -> SeenPage:
    """Look at a page.

    Args:
        profile: an empty folder, for the browser alone.
    """
    return asyncio.run(_look(glance, profile))


async def _look(glance: Glance, profile: Path) -> SeenPage:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-port=0",
        "about:blank", stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(100), aiohttp.ClientSession() as session:
            port = await _debugging_port(profile)
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                [page] = [one for one in await response.json() if one["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                return await _see(socket, glance)
    finally:
        process.kill()
        await process.wait()


async def _debugging_port(profile: Path) -> int:
    """Return the port that the browser chose and wrote to its profile."""
    noted = profile / "DevToolsActivePort"
    while not (noted.exists() and noted.read_text().count("\n")):  # noqa: ASYNC110  # its file
        await asyncio.sleep(0.05)
    return int(noted.read_text().splitlines()[0])


async def _see(socket: aiohttp.ClientWebSocketResponse, glance: Glance) -> SeenPage:
    numbers = itertools.count(1)
    complaints: list[str] = []

    async def ask(method: str, **params: Any) -> dict[str, Any]:
        number = next(numbers)
        await socket.send_json({"id": number, "method": method, "params": params})
        while (answer := await socket.receive_json()).get("id") != number:
            complaints.extend(_complaints(answer))
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    async def evaluate(script: str) -> Any:
        found = await ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    scheme = {"name": "prefers-color-scheme", "value": "dark" if glance.is_dark else "light"}
    screen = {"height": 900, "deviceScaleFactor": 1, "mobile": glance.width < 600}
    await ask("Emulation.setEmulatedMedia", features=[scheme])
    await ask("Emulation.setDeviceMetricsOverride", width=glance.width, **screen)
    for domain in ("Page", "Log", "Runtime", "Network"):
        await ask(f"{domain}.enable")
    if glance.authorization:
        headers = {"Authorization": glance.authorization}
        await ask("Network.setExtraHTTPHeaders", headers=headers)
    if not glance.scripts:
        await ask("Emulation.setScriptExecutionDisabled", value=True)
    await ask("Page.navigate", url=glance.url)
    ready = 'location.protocol != "about:" && document.readyState == "complete"'
    while not await evaluate(ready):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.05)
    found = await evaluate(glance.script) if glance.script else None
    height = await evaluate("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": glance.width, "height": height, "scale": 1}
    shot = await ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    return SeenPage(
        overflowing=await evaluate(_OVERFLOWING),
        pictures=await evaluate(_PICTURES),
        picture=base64.b64decode(shot["data"]),
        text=await evaluate("document.body.innerText"),
        complaints=complaints,
        found=found,
    )


def _complaints(event: dict[str, Any]) -> list[str]:
    """Return the warnings and errors in an event of the browser."""
    said = event.get("params", {})
    match event.get("method"):
        case "Log.entryAdded" if said["entry"]["level"] in ("warning", "error"):
            return [said["entry"]["text"]]
        case "Runtime.exceptionThrown":
            return [said["exceptionDetails"]["text"]]
        case "Runtime.consoleAPICalled" if said["type"] in ("warning", "error", "assert"):
            return [str(said["args"])]
    return []
