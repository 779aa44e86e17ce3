"""Commands and code of README and the quickstart work against a router that wants API keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.access.api_keys import entry_text
from baton.api.errors import UnauthenticatedError
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
KEY = "open-sesame"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    urgent = "limits = { most_urgent_priority = -1 }\n"
    keys.write_text(f"# Who may call.\n{entry_text(KEY, 'ali')}{urgent}", encoding="utf-8")
    config = LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        http_listen=free_address(),
        router_args=[
            "--api-keys-file", str(keys), "--served-model-name", "examples/demo_model",
        ],
        node_args=["--kv-cache-memory", "32M"],
    )  # fmt: skip
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
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


# Commands that serve until they are stopped: other tests start them.
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
