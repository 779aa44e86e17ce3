"""The status page in a real browser, of a real router with simulated nodes of two revisions."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from baton.processes.child_processes import PYTHON_MODULE
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.outside.browser import CHROMIUM, Glance, SeenPage, look
from tests.fakes.processes.deployments import READY_TIMEOUT_S

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

TOKEN = "what operators bring"
_AXE = """async function() {{ {source};
  const found = await axe.run(document, {{resultTypes: ["violations"]}});
  return found.violations.filter(one => ["serious", "critical"].includes(one.impact))
    .map(one => one.id + ": " + one.nodes.map(node => node.html).join(" | ").slice(0, 300));
}}()"""
_KEYS = """(async function() {
  const press = key => document.body.dispatchEvent(
    new KeyboardEvent("keydown", {key, bubbles: true}));
  press("/");
  const filter = document.activeElement;
  const all = [...document.querySelectorAll("#nodes tbody tr")];
  filter.value = "old-d"; filter.dispatchEvent(new Event("input"));
  const shown = all.filter(row => row.offsetParent !== null).length;
  filter.blur();
  press("p");
  const held = document.querySelector("#controls button").getAttribute("aria-pressed");
  press("p");
  press("2");
  return [filter.type, all.length, shown, held, document.activeElement.textContent];
})()"""


@dataclass(frozen=True)
class Site:
    """Address of a running router's HTTP API, and one finished request.

    Attributes:
        url: URL of the HTTP API.
        request_id: id of a request that has finished.
    """

    url: str
    request_id: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A router with a token, and nodes of two revisions that have answered some requests."""
    folder = tmp_path_factory.mktemp("site")
    listen, http = free_address(), free_address()
    model, join = str(DEMO_MODEL), "what nodes bring"
    commands = [
        ["router", "--listen", listen, "--http-listen", http, "--admin-token", TOKEN,
         "--node-token", join, "--no-local-prefill"],
        *(
            ["sim-node", "--router", listen, "--name", name, "--prefill", prefill, "--decode",
             decode, "--revision", name, "--node-token", join, "--num-blocks", "2000"]
            for name, prefill, decode in (("old", "2", "3"), ("new", "1", "1"))
        ),
    ]  # fmt: skip
    processes = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*PYTHON_MODULE, "baton", *command, "--model", model],
                        stdout=log,
                        stderr=log,
                        env=os.environ,
                    )
                )
        yield Site(f"http://{http}", asyncio.run(_ask(listen)))
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _ask(router: str) -> str:
    async with AsyncClient(router, api_key=TOKEN) as client:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                calls = (client.generate([5] * 300, params, timeout_s=30) for _ in range(12))
                done = await asyncio.gather(*calls, return_exceptions=True)
                finished = [one for one in done if not isinstance(one, BaseException)]
                if len(finished) == len(done):
                    return finished[0].request_id
                await asyncio.sleep(0.5)


def glance(
    site: Site,
    folder: Path,
    *,
    path: str = "/ui",
    width: int = 1280,
    is_dark: bool = False,
    scripts: bool = True,
    script: str = "",
) -> SeenPage:
    key = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    seen = look(
        Glance(
            url=site.url + path,
            width=width,
            is_dark=is_dark,
            authorization=f"Basic {key}",
            scripts=scripts,
            script=script,
        ),
        folder / "profile",
    )
    (folder / "page.png").write_bytes(seen.picture)
    return seen


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("is_of_one", [False, True], ids=["all", "one"])
def test_it_fits_every_screen_and_the_console_is_silent(
    site: Site, tmp_path: Path, width: int, is_dark: bool, is_of_one: bool
) -> None:
    path = f"/ui/requests/{site.request_id}" if is_of_one else "/ui"
    seen = glance(site, tmp_path, path=path, width=width, is_dark=is_dark)
    assert seen.complaints == []
    assert seen.overflowing == []
    words = ("Attempts", "Placement") if is_of_one else ("old-d2", "new-p0", "rolling", "finished")
    for word in words:
        assert word in seen.text
    assert len(seen.picture) > 20_000


def test_without_scripts_it_says_the_same(site: Site, tmp_path: Path) -> None:
    seen = glance(site, tmp_path, scripts=False)
    for word in ("old-d2", "new-p0", "rolling", "finished", "41.0 GB/s"):
        assert word in seen.text


def test_it_obeys_the_keyboard(site: Site, tmp_path: Path) -> None:
    seen = glance(site, tmp_path, script=_KEYS)
    assert seen.found == ["search", 7, 3, "true", "Nodes"]
    assert seen.complaints == []


def test_it_goes_on_by_itself(site: Site, tmp_path: Path) -> None:
    told = "document.querySelector('[data-live=told]').textContent"
    seen = glance(
        site,
        tmp_path,
        script=f"""(async function() {{
          const first = {told};
          for (let i = 0; i < 300 && {told} === first; i++)
            await new Promise(done => setTimeout(done, 100));
          return {told} !== first;
        }})()""",
    )
    assert seen.found is True


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Axe-core's source, from npm."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [
        npm,
        "install",
        "--no-save",
        "--ignore-scripts",
        "--prefix",
        str(folder),
        "axe-core@4",
    ]
    if subprocess.run(command, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("axe-core cannot be had from npm here")
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("is_of_one", [False, True], ids=["all", "one"])
def test_axe_finds_nothing_serious(
    site: Site, tmp_path: Path, axe: str, width: int, is_dark: bool, is_of_one: bool
) -> None:
    path = f"/ui/requests/{site.request_id}" if is_of_one else "/ui"
    script = f"({_AXE.format(source=axe)})"
    seen = glance(site, tmp_path, path=path, width=width, is_dark=is_dark, script=script)
    assert seen.found == []


def test_a_router_that_went_away_is_told(site: Site, tmp_path: Path) -> None:
    """The page stays, dimmed, and says so: nothing on it is true any more."""
    script = """(async function() {
      window.fetch = () => Promise.reject(new Error("away"));
      for (let i = 0; i < 300 && !document.body.classList.contains("stale"); i++)
        await new Promise(done => setTimeout(done, 100));
      return document.getElementById("live").textContent;
    })()"""
    assert glance(site, tmp_path, script=script).found == "the router does not answer"
