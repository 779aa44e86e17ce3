"""Tests that failed once are recorded, with date and revision, and counted by name."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tools import second_tries

NOW = datetime(2026, 11, 29, 3, 0, tzinfo=UTC)


def failed(root: Path, *tests: str) -> None:
    file = root / second_tries.LAST_FAILED
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dict.fromkeys(tests, True)))


def test_each_failed_run_is_a_line_and_tests_are_counted_by_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "build" / "tries.jsonl"
    for day, tests in enumerate((("t.py::b", "t.py::a"), ("t.py::b",))):
        failed(tmp_path, *tests)
        now = NOW + timedelta(days=day)
        assert second_tries.note(tmp_path, record, now=now, revision="abc") == len(tests)
    first = json.loads(record.read_text().splitlines()[0])
    assert first == {
        "date": "2026-11-29T03:00:00+00:00",
        "revision": "abc",
        "tests": ["t.py::a", "t.py::b"],
    }
    monkeypatch.setenv("BATON_SECOND_TRIES", str(record))
    assert second_tries.main(tmp_path, ["show"]) == 0
    assert capsys.readouterr().out == (
        "   2 t.py::b (2026-11-29 1, 2026-11-30 1)\n   1 t.py::a (2026-11-29 1)\n"
    )


def test_without_failures_nothing_is_written(tmp_path: Path) -> None:
    record = tmp_path / "tries.jsonl"
    assert second_tries.note(tmp_path, record, now=NOW, revision="abc") == 0
    assert not record.exists()
    assert not second_tries.days_of(record)


def test_the_record_is_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_SECOND_TRIES", raising=False)
    assert second_tries.record_of(tmp_path) == tmp_path / "build" / "second_tries.jsonl"
    monkeypatch.setenv("BATON_SECOND_TRIES", "/elsewhere")
    assert second_tries.record_of(tmp_path) == Path("/elsewhere")
