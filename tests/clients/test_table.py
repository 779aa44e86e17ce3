"""Tests that the page of clients is right: every row has its script, every script its row."""

from __future__ import annotations

import re

import pytest

from tests.clients.agents.agents import AGENTS, Agent
from tests.clients.agents.settings import read_settings
from tests.clients.environments import REQUIREMENTS, ROOT
from tests.clients.table import CLIENTS, SCRIPTS, Client

PAGE = ROOT / "docs" / "clients.md"
# | `package` | version | ...
_ROW = re.compile(r"^\| `([\w-]+)` \| ([\d.]+) \|", re.MULTILINE)


def test_the_page_has_a_row_for_each_client_and_no_other() -> None:
    rows = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert rows == [(client.package, client.lowest_version) for client in CLIENTS]


def test_no_script_is_left_without_a_client() -> None:
    assert sorted(SCRIPTS.glob("try_*.py")) == sorted(client.script for client in CLIENTS)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.package)
def test_a_script_runs_every_check_that_it_has(client: Client) -> None:
    source = client.script.read_text(encoding="utf-8")
    checks = re.findall(r"^def (\w+)\(system: System\) -> None:$", source, re.MULTILINE)
    called = re.search(r"^    run\((.*?)\)$", source, re.MULTILINE | re.DOTALL)
    assert called
    assert [name for name in re.split(r"[,\s]+", called[1]) if name] == checks


def test_the_page_has_settings_for_each_agent_and_no_other() -> None:
    assert list(read_settings()) == [agent.package for agent in AGENTS]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_settings_name_the_version_that_is_installed_and_the_router(agent: Agent) -> None:
    settings = read_settings()[agent.package]
    kind = "json" if agent.is_of_npm else "txt"
    requirements = (REQUIREMENTS / f"{agent.name}.{kind}").read_text(encoding="utf-8")
    assert f"={settings.version}" in requirements or f'"{settings.version}"' in requirements
    moved = settings.at("127.0.0.1:1234")
    assert "127.0.0.1:1234" in f"{moved.variables} {moved.files}"
    assert ":8000" not in f"{moved.variables} {moved.files}"
