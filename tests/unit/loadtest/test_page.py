"""The page of a result: every number is the JSON's, in a real browser, without a network."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from loadtest.audit import BlockAudit
from loadtest.fault_report import report_faults
from loadtest.faults import Fault, FaultEvent
from loadtest.generate import Lengths
from loadtest.page import page
from loadtest.page.page import look_up, render_figures, render_page, write_page, write_pictures
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report import plain, result_to_json
from loadtest.slo import Slo
from tests.fakes.browser import CHROMIUM, open_page
from tests.fakes.load_targets import Answer, ScriptedTarget, even, run_virtually

HOSTILE = "</script><script>alert(1)</script>"
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine; tools/install_chromium.sh installs it"
)


def script(number: int, length: int) -> Answer:
    answer = even(0.1 + number % 7 / 10, 0.02 + number % 3 / 100)(number, length)
    return Answer(frames=answer.frames, error="UNAVAILABLE" if number % 10 == 3 else "")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    plan = LoadPlan(
        load=OpenLoop(rate_per_s=20.0),
        input_lengths=Lengths(4),
        output_lengths=Lengths(10),
        warmup_s=1.0,
        duration_s=10.0,
        slo=Slo.parse("ttft=0.5"),
        max_lag_s=0.1,
    )
    result = run_virtually(plan, ScriptedTarget(script))
    document = result_to_json(result, {"url": "grpc://nowhere:1", "model": HOSTILE})
    event = FaultEvent(fault=Fault.parse("stop d0 @5-6s"), began_s=5.0, ended_s=6.0, num_orphans=0)
    faults = report_faults(plan, result.records, [event], 10.0)
    audit = BlockAudit(num_orphans=0, num_held=3, problems=("p0: is not there",))
    document |= {
        "faults": list(map(dataclasses.asdict, faults)),
        "audit": dataclasses.asdict(audit),
    }
    return plain(document)


class Numbers(HTMLParser):
    """What the page shows: (path, exact value, text) of every number, and the JSON in it."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.embedded = ""
        self.pictures: list[dict[str, str | None]] = []
        self._open: tuple[str, str] | None = None
        self._is_json = False
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "data-path" in given:
            self._open = (str(given["data-path"]), str(given["data-value"]))
        self._is_json = tag == "script" and given.get("id") == "result"
        if tag == "img":
            self.pictures.append(given)

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.found.append((*self._open, data))
            self._open = None
        if self._is_json:
            self.embedded += data

    def handle_endtag(self, tag: str) -> None:
        self._is_json = False


def assert_numbers_are_those_of(document: dict[str, Any], dom: str) -> Numbers:
    shown = Numbers(dom)
    assert json.loads(shown.embedded) == document
    for path, exact, text in shown.found:
        value = look_up(document, path)
        assert exact == repr(value)
        digits = float(re.sub(r"[,%]", "", text))
        scale = 100 if "%" in text else 1000 if path.endswith("_s") or ".slo." in path else 1
        candidates = (value, value * scale, value * 1000)
        half = 0.5 if "." not in text else 0.5 * 10 ** -len(text.rstrip("%").partition(".")[2])
        assert any(abs(digits - one) <= half * 1.0001 for one in candidates), (path, text, value)
    return shown


@needs_chromium
def test_a_browser_shows_the_numbers_of_the_json(document: dict[str, Any], tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", document)
    opened = open_page(tmp_path / "page.html", tmp_path / "profile")
    assert opened.complaints == []
    shown = assert_numbers_are_those_of(document, opened.dom)
    paths = {path for path, _, _ in shown.found}
    for name in ("ttft_s", "tpot_s", "itl_s", "frame_gap_s", "e2e_s"):
        assert {f"summary.latencies.{name}.{column}" for column in page.COLUMNS} <= paths
    assert {"faults.0.lowest_share", "faults.0.num_lost", "audit.num_held"} <= paths
    assert {"summary.goodput_per_s", "summary.attainment", "summary.errors.UNAVAILABLE"} <= paths


@needs_chromium
def test_a_browser_that_has_something_to_complain_about_does(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<script>console.error('so'); nothing.there</script>")
    opened = open_page(tmp_path / "page.html", tmp_path / "profile")
    assert len(opened.complaints) == 2


def test_the_page_needs_nothing_but_itself(document: dict[str, Any]) -> None:
    text = render_page(document)
    shown = assert_numbers_are_those_of(document, text)
    assert not re.search(r"(?:src|href)=(?!\"data:)", text)
    assert "default-src 'none'" in text
    assert HOSTILE not in text
    assert "stop d0 @5-6s" in text
    assert "p0: is not there" in text
    assert [one["id"] for one in shown.pictures] == ["latency_cdfs", "timeline"]
    assert all(one["alt"] for one in shown.pictures)


def test_pictures_are_files_and_always_the_same(document: dict[str, Any], tmp_path: Path) -> None:
    write_pictures(tmp_path, document)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latency_cdfs.png", "timeline.png"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert render_figures(document, "svg") == render_figures(document, "svg")
    with pytest.raises(ConfigError, match=r"html: .* cannot be written"):
        write_page(tmp_path / "no" / "page.html", document)


def test_without_the_library_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "loadtest.page.figures", None)
    with pytest.raises(ConfigError, match=r"html, png: need matplotlib, of .*\[report\]"):
        page.load_figures()
