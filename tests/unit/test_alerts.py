"""Tests of the alert rules: Prometheus's own rule tests pass, and each alert has its page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.fakes.outside.prometheus import NEEDS_PROMETHEUS
from tools.dashboards import DASHBOARDS, FOLDER, make, queries

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"
RULES = (OBSERVABILITY / "rules.yaml").read_text(encoding="utf-8")
CASES = (OBSERVABILITY / "rules_test.yaml").read_text(encoding="utf-8")
ALERTS = re.findall(r"^ +- alert: (\w+)$", RULES, re.MULTILINE)
# Of what Prometheus makes of a histogram, and of counters in code.
SUFFIX = re.compile(r"_(bucket|sum|count)$")


@NEEDS_PROMETHEUS
@pytest.mark.medium
def test_each_alert_is_silent_fires_and_clears() -> None:
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=OBSERVABILITY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_cases_and_a_section_of_the_runbook() -> None:
    assert len(set(ALERTS)) == len(ALERTS) > 20
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", runbook, re.MULTILINE) == ALERTS
    assert re.findall(r"^  - name: (\w+)$", CASES, re.MULTILINE) == ALERTS
    links = re.findall(r"runbook_url: docs/runbook.md#(\w+)$", RULES, re.MULTILINE)
    assert links == [name.lower() for name in ALERTS]
    for name in ALERTS:
        assert CASES.count(f'sum(ALERTS{{alertname="{name}"') == 3  # before, amid, behind


def test_rules_and_dashboards_ask_for_metrics_that_there_are() -> None:
    pages = "".join(
        (ROOT / "docs" / page).read_text(encoding="utf-8")
        for page in ("metrics.md", "openai_api.md")
    )
    documented = set(re.findall(r"^\| `(baton_\w+)` \|", pages, re.MULTILINE))
    asked = RULES + "".join(query for _, query in queries())
    names = {SUFFIX.sub("", name) for name in re.findall(r"\bbaton_\w+", asked)}
    assert names <= documented


def test_the_dashboards_in_the_repository_are_those_of_the_table() -> None:
    for uid in DASHBOARDS:
        assert (FOLDER / f"{uid}.json").read_text(encoding="utf-8") == make(uid)
