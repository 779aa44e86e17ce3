"""Tests of a result's page in a real browser without a network: its numbers are the JSON's."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ConfigError
from loadtest.drills.audit import BlockAudit
from loadtest.drills.faults import Fault, FaultEvent
from loadtest.load.generate import Lengths
from loadtest.page import page
from loadtest.page.page import look_up, render_figures, render_page, write_page, write_pictures
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report.fault_report import report_faults
from loadtest.report.report import plain, result_to_json
from loadtest.report.series import waterfall
from loadtest.slo import Slo
from tests.fakes.outside.browser import CHROMIUM, look_at_page, open_page
from tests.fakes.outside.load_targets import Answer, ScriptedTarget, even, run_virtually
from tests.unit.loadtest.test_series import receipt

pytestmark = pytest.mark.large

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


LABELS = re.compile(r"\bp(50|90|95|99(\.9)?)\b|95 %|E2E")  # names of columns, not results
SILENT = ("script", "style", "pre", "title")


class Numbers(HTMLParser):
    """Parser of the numbers and texts that the page shows.

    Attributes:
        found: path, exact value and text of every number.
        sentences: path and text of what the document says in words.
        loose: all other text.
        embedded: the JSON in the page.
    """

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.sentences: list[tuple[str, str]] = []
        self.loose = ""
        self.embedded = ""
        self.pictures: list[dict[str, str | None]] = []
        self._open: dict[str, str | None] = {}
        self._tags: list[str] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = dict(attrs)
        if tag == "img":
            self.pictures.append(self._open)
        elif tag not in ("meta", "link", "br", "source"):
            self._tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open.get("id") == "result":
            self.embedded += data
        elif "data-path" in self._open:
            self.found.append((str(self._open["data-path"]), str(self._open["data-value"]), data))
        elif "data-text" in self._open:
            self.sentences.append((str(self._open["data-text"]), data))
        elif not set(self._tags) & set(SILENT):
            self.loose += f" {data}"

    def handle_endtag(self, tag: str) -> None:
        self._open = {}
        while self._tags and self._tags.pop() != tag:
            pass


def assert_numbers_are_those_of(document: dict[str, Any], dom: str) -> Numbers:
    """Every number on the page is one of the document, or the page would not be true."""
    shown = Numbers(dom)
    assert json.loads(shown.embedded) == document
    for path, exact, text in shown.found:
        value = look_up(document, path)
        assert exact == repr(value)
        digits = float(re.sub(r"[,%]", "", text))
        candidates = (value, value * 100, value * 1000, value + 1 if "repeat" in path else value)
        half = 0.5 if "." not in text else 0.5 * 10 ** -len(text.rstrip("%").partition(".")[2])
        assert any(abs(digits - one) <= half * 1.0001 for one in candidates), (path, text, value)
        is_percent = "%" in text
        assert is_percent == path.endswith(("share", "attainment", "attainment.mean",
                                            "attainment.low", "attainment.high")), path  # fmt: skip
    for path, text in shown.sentences:
        assert text == look_up(document, path)
    left = LABELS.sub("", shown.loose)
    assert not re.search(r"\d", left), re.findall(r".{0,30}\d.{0,30}", left)
    return shown


def assert_numbers_agree(summary: dict[str, Any]) -> None:
    """With each other, within one run."""
    latencies, cache = summary["latencies"], summary["cache"]
    assert summary["goodput_per_s"] <= summary["requests_per_s"] <= summary["asked_per_s"]
    num_failed = sum(summary["errors"].values())
    assert summary["num_ok"] + summary["num_cancelled"] + num_failed == summary["num_requests"]
    begin_s, end_s = summary["window_s"]
    assert summary["asked_per_s"] == pytest.approx(summary["num_requests"] / (end_s - begin_s))
    assert summary["rate_span_s"] >= end_s - begin_s
    rate = summary["num_ok"] / summary["rate_span_s"]
    assert summary["requests_per_s"] == pytest.approx(rate)
    num_judged = summary["num_requests"] - summary["num_cancelled"]
    good = summary["attainment"] * num_judged / summary["rate_span_s"]
    assert summary["goodput_per_s"] == pytest.approx(good)
    assert latencies["e2e_s"]["count"] == summary["num_ok"]
    assert cache["num_cached_tokens"] <= cache["num_prompt_tokens"]


@needs_chromium
def test_a_browser_shows_the_numbers_of_the_json(document: dict[str, Any], tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", document)
    opened = open_page(tmp_path / "page.html", tmp_path / "profile")
    assert opened.complaints == []
    shown = assert_numbers_are_those_of(document, opened.dom)
    assert_numbers_agree(document["summary"])
    paths = {path for path, _, _ in shown.found}
    for name in ("ttft_s", "tpot_s", "itl_s", "frame_gap_s", "e2e_s"):
        assert {f"summary.latencies.{name}.{column}" for column in page.COLUMNS} <= paths
    assert {"faults.0.lowest_share", "faults.0.num_lost", "audit.num_held"} <= paths
    assert {"summary.goodput_per_s", "summary.attainment", "summary.errors.UNAVAILABLE"} <= paths


@needs_chromium
def test_it_fits_a_phone_and_is_dark_where_wanted(document: dict[str, Any], tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", document)
    seen = look_at_page(tmp_path / "page.html", tmp_path / "profile", width=390, is_dark=True)
    assert seen.overflowing == []
    prefix = "data:image/svg+xml;base64,"
    shown = [base64.b64decode(one.removeprefix(prefix)) for one in seen.pictures]
    _, palette = page.load_figures()
    drawn = render_figures(document, "svg", is_narrow=True).values()
    assert shown == list(map(palette.darken, drawn))


def test_what_is_made_dark_is_what_is_drawn_dark(document: dict[str, Any]) -> None:
    figures, palette = page.load_figures()
    with palette.style(palette.DARK):
        found = figures.all_figures(document, palette.DARK)
        drawn = {name: palette.render(figure, "svg") for name, figure in found.items()}
    made = {name: palette.darken(svg) for name, svg in render_figures(document, "svg").items()}
    assert made != render_figures(document, "svg")
    assert list(map(without_ids, made.values())) == list(map(without_ids, drawn.values()))


def without_ids(svg: bytes) -> bytes:
    """Markers and clips are named by a digest, colours included."""
    return re.sub(rb"\b[a-z][0-9a-f]{10}\b", b"", svg)


def test_curves_have_the_limits_of_the_slo_and_a_legend(document: dict[str, Any]) -> None:
    figures, palette = page.load_figures()
    with palette.style(palette.LIGHT):
        found = figures.all_figures(document, palette.LIGHT)
    ttft = document["summary"]["latencies"]["ttft_s"]
    p50, p99 = (f"{name} {ttft[name] * 1e3:,.0f} ms" for name in ("p50", "p99"))
    assert legend(found["latency_cdfs"].axes[0]) == [p50, p99, "SLO 500 ms"]
    assert all(legend(axes) for axes in (*found["latency_cdfs"].axes, *found["timeline"].axes))
    assert "SLO of TTFT 500 ms" in legend(found["timeline"].axes[2])


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("is_narrow", [False, True])
def test_no_bar_of_the_waterfall_leaves_its_axis(is_narrow: bool) -> None:
    receipts = [receipt(alone=False, scale=1), receipt(alone=True, scale=30)]
    stages = [dataclasses.asdict(stage) for stage in waterfall(receipts)]
    figures, palette = page.load_figures()
    look = dataclasses.replace(palette.DARK, is_narrow=is_narrow)
    with palette.style(look):
        figure = figures.waterfall({"series": {"waterfall": stages}}, look)
    bars = [
        (bar.get_x() + bar.get_width(), axes.get_xlim()[1])
        for axes in figure.axes
        for bar in axes.patches
    ]
    assert len(bars) == len(stages) + 1  # the time to the first token is a bar of its own
    assert all(end <= limit for end, limit in bars)


@needs_chromium
def test_a_browser_that_has_something_to_complain_about_does(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<script>console.error('so'); nothing.there</script>")
    opened = open_page(tmp_path / "page.html", tmp_path / "profile")
    assert len(opened.complaints) == 2


def test_the_page_needs_nothing_but_itself(document: dict[str, Any]) -> None:
    text = render_page(document)
    shown = assert_numbers_are_those_of(document, text)
    assert not re.search(r"(?:src|srcset|href)=(?!\"data:)", text)
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
