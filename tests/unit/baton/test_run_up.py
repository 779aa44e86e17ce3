"""Unit tests of `baton up` after its start: it restarts dead programs, but not forever."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from baton.api.errors import ConfigError
from baton.cli.programs import run_up
from baton.cli.programs.run_up import MAX_RESTARTS, _Keeper, _say_ready
from baton.deployment.local_deployment import Child, LocalDeployment, LocalDeploymentConfig
from baton.kernel_library.state import ADVICE, KernelState


@dataclass
class ScriptedDeployment:
    """A deployment whose processes die, leave and become ready when a test says so."""

    config: LocalDeploymentConfig
    children: list[Child] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    kernels: KernelState = field(default_factory=KernelState)
    log_folder: Path = Path("/logs")

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def ended(self, *, may_leave: bool) -> list[Child]:
        self.children = [child for child in self.children if child.name not in self.gone]
        return [child for child in self.children if child.name in self.dead]

    def why_ended(self, child: Child) -> str:
        return f"crashed (SIGSEGV); log: {child.log}"

    def restart(self, name: str) -> Child:
        self.dead.remove(name)
        self.restarted.append(name)
        self.children[self.children.index(self.child(name))] = child(name, "starting", 2)
        return self.child(name)

    def update_states(self) -> None:
        for one in self.children:
            one.state = "ready"


def child(name: str, state: str = "ready", pid: int = 1) -> Child:
    process: Any = SimpleNamespace(pid=pid)
    return Child(name, process, Path(f"/logs/{name}.log"), [], None, state)


def scripted(**options: Any) -> tuple[ScriptedDeployment, Console, io.StringIO]:
    page = io.StringIO()
    console = Console(file=page, width=80, highlight=False)
    config = LocalDeploymentConfig(
        model="m", listen="127.0.0.1:1", http_listen="127.0.0.1:2", **options
    )
    deployment = ScriptedDeployment(config, [child(name) for name in ("router", "p0", "d0")])
    return deployment, console, page


@pytest.mark.parametrize("name", ["router", "p0", "d0"])
def test_what_dies_is_told_started_again_and_told_when_it_is_ready(name: str) -> None:
    """Regression: one node's death ended the router and all other nodes."""
    deployment, console, page = scripted()
    keeper = _Keeper(cast("LocalDeployment", deployment), console)
    keeper.check()
    assert page.getvalue() == ""
    deployment.dead = [name]
    keeper.check()
    assert deployment.restarted == [name]
    assert page.getvalue().splitlines() == [
        f"{name} ended: crashed (SIGSEGV); log: /logs/{name}.log",
        f"{name} is started again",
        f"{name} is ready again (pid 2)",
    ]


def test_what_dies_again_and_again_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, console, _ = scripted()
    now = [0.0]
    monkeypatch.setattr("baton.cli.programs.run_up.time.monotonic", lambda: now[0])
    keeper = _Keeper(cast("LocalDeployment", deployment), console)
    for _ in range(2 * MAX_RESTARTS):  # seldom: for ever
        now[0] += run_up.RESTARTS_WITHIN_S
        deployment.dead = ["d0"]
        keeper.check()
    now[0] += run_up.RESTARTS_WITHIN_S
    for _ in range(MAX_RESTARTS):
        now[0] += 1
        deployment.dead = ["d0"]
        keeper.check()
    deployment.dead = ["d0"]
    with pytest.raises(ConfigError, match=r"^d0 ended 6 times within 10 min: crashed \(SIGSEGV\)"):
        keeper.check()


def test_a_node_that_leaves_on_purpose_is_told() -> None:
    deployment, console, page = scripted()
    deployment.gone = ["p0"]
    _Keeper(cast("LocalDeployment", deployment), console).check()
    assert page.getvalue() == "p0 has left\n"
    assert deployment.restarted == []


def ready_lines(deployment: ScriptedDeployment, console: Console, page: io.StringIO) -> list[str]:
    _say_ready(cast("LocalDeployment", deployment), console)
    return page.getvalue().splitlines()


def test_a_ready_deployment_names_all_that_its_user_can_open() -> None:
    lines = ready_lines(*scripted())
    assert lines == [
        'ready  baton generate --router 127.0.0.1:1 "def add(a, b):"',
        '       baton chat --router 127.0.0.1:1 --system "Answer in one short sentence."',
        "       OpenAI API:  http://127.0.0.1:2/v1",
        "       status page: http://127.0.0.1:2/ui",
        "       logs: /logs (removed at the end, unless something fails)",
        "Ctrl-C stops everything",
    ]


def test_a_key_that_is_needed_is_in_the_command() -> None:
    [first, *_] = ready_lines(*scripted(router_args=["--api-keys-file", "keys.toml"]))
    assert first.startswith("ready  BATON_API_KEY=KEY baton generate --router ")


def test_missing_kernels_are_told_with_what_they_cost_and_what_to_install() -> None:
    deployment, console, page = scripted()
    deployment.kernels = KernelState(problem="no C compiler (cc, gcc, clang)", advice=ADVICE)
    *_, said, advice, _ = ready_lines(deployment, console, page)
    assert said == (
        "no native kernels: no C compiler (cc, gcc, clang), so tokens come 4 to 5 times slower"
    )
    assert advice.startswith("  install a C compiler (apt install gcc, ")
