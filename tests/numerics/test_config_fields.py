"""Check that each config.json field means the same as in transformers, or is refused by name.

One test drops fields; another also sets each to null and to other values. config_table.py counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from models.registry import MODELS
from tests.numerics.config_check import ConfigCheck, Outcome
from tests.numerics.config_fields import base_configs, changes, read_by_baton
from tests.numerics.config_table import all_changes, table


@pytest.mark.parametrize("architecture", MODELS.names())
def test_fields_that_a_file_leaves_out(architecture: str, tmp_path: Path) -> None:
    config = base_configs(architecture)[0]
    check = ConfigCheck(architecture, tmp_path)
    assert check.check(config, ()).outcome is Outcome.EQUAL
    found = {
        change.field: check.check(change.config, change.names)
        for change in changes(config, architecture, sorted(read_by_baton()))
        if change.kind == "dropped"
    }
    assert len(found) > 10
    different = {n: one for n, one in found.items() if one.outcome is Outcome.DIFFERENT}
    assert not different


@pytest.mark.large
@pytest.mark.parametrize("architecture", MODELS.names())
def test_every_change_of_every_field(architecture: str, tmp_path: Path) -> None:
    check = ConfigCheck(architecture, tmp_path)
    num_equal, different = 0, []
    for change in all_changes(architecture):
        verdict = check.check(change.config, change.names)
        num_equal += verdict.outcome is Outcome.EQUAL
        if verdict.outcome is Outcome.DIFFERENT:
            different.append((change.field, change.kind, verdict.detail))
    assert num_equal > 100
    assert not different


def test_a_table_counts_what_came_of_each_change() -> None:
    left_out = {"dropped": {"equal": 2}, "null": {"equal": 3, "refused by name": 1}}
    row = {"architecture": "A", **left_out, "changed": {"different": 3, "failed": 4}}
    assert table([row]).splitlines()[-1] == "| `A` | 5 | 1 | 0 | 0 | 0 | 0 | 0 | 7 |"
