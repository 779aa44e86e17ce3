"""The page of clients says what is tried: every row has its script, every script its row."""

from __future__ import annotations

import re

import pytest

from tests.clients.environments import ROOT
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
