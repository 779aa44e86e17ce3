"""Tests of the page of figures: it follows the results files, and no file can break it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.engine_cpu.rows import ENGINE_CPU
from benchmarks.gpu import rows as gpu
from benchmarks.loadtest.rows import COMPARE
from benchmarks.page.headlines import HEADLINES
from benchmarks.page.measures import at, number, ratio, told, value
from benchmarks.page.page import CHANGES, RESULTS, anchor, write
from benchmarks.page.rows import Found, Json, Measurement, Row, Source, Subject
from benchmarks.page.write_performance import PAGE, SUBJECTS, count_changes, write_page

ROOT = Path(__file__).resolve().parents[3]
MEASUREMENTS = [one for subject in SUBJECTS for one in subject.measurements]
SOURCES = [source for one in MEASUREMENTS for source in one.sources]
DAMAGES: tuple[object, ...] = (None, "text", [], {}, -1, {"a": None}, [[]])
ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00",
    "git_revision": "abc1234",
    "cpu": "Test CPU",
    "num_cores": 2,
    "load_average": [0.5, 0, 0],
    "load_average_after": [1.5, 0, 0],
}


def row(**fields: str) -> Row:
    return Row("speed", value("a"), ">= 2", **fields)


def page_of(document: object, tmp_path: Path, *rows: Row) -> str:
    """The page of one file, written as it is if it is text."""
    (tmp_path / RESULTS).mkdir(parents=True, exist_ok=True)
    text = document if isinstance(document, str) else json.dumps(document)
    (tmp_path / RESULTS / "one.json").write_text(text, encoding="utf-8")
    return write([subject_of(Source("one", rows))], tmp_path)


def subject_of(source: Source) -> Subject:
    return Subject("Area", (Measurement("subject.one", "engine", (source,)),))


def cells(page: str, what: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {what} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_script_makes_of_the_files() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    expected = write(SUBJECTS, ROOT, HEADLINES)
    assert CHANGES.sub("", written) == CHANGES.sub("", expected), "run `make performance`"


def test_files_without_anything_give_a_page_of_what_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    write_page(tmp_path)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    num_rows = sum(len(source.rows) for source in SOURCES)
    # Headlines have the words too, and so has the head of the table of subjects.
    assert page.count("| not measured |") == num_rows + 1 + len(HEADLINES)
    assert "| yes |\n" not in page
    assert "missed**" not in page
    assert "](../benchmarks/results/" not in page  # no link to a file that is not there


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"environment": 3}'])
def test_a_file_that_is_none_of_ours_is_not_measured(
    source: Source, text: str, tmp_path: Path
) -> None:
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / RESULTS / f"{source.name}.json").write_text(text, encoding="utf-8")
    page = write([subject_of(source)], tmp_path)
    assert page.count("| not measured |") == len(source.rows) + 1


@pytest.mark.medium
def test_every_value_of_every_file_may_be_damaged(tmp_path: Path) -> None:
    """Each subtree in turn is something else; the rest of the page stays."""
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    for source in SOURCES:
        path = tmp_path / RESULTS / f"{source.name}.json"
        if not path.exists():
            continue
        whole = json.loads(path.read_text(encoding="utf-8"))
        for key in whole:
            for damage in DAMAGES:
                path.write_text(json.dumps({**whole, key: damage}), encoding="utf-8")
                page = write([subject_of(source)], tmp_path)
                assert page.count(" |\n") >= len(source.rows)


def test_a_row_says_what_was_measured_and_whether_that_is_enough(tmp_path: Path) -> None:
    held = page_of({"environment": ENVIRONMENT, "a": 2}, tmp_path, row())
    assert cells(held, "speed") == ["speed", ">= 2", "2", "yes"]
    assert "revision abc1234, 2026-01-02 03:04 UTC, Test CPU, 2 cores" in held
    assert "load average 0.5 before, 1.5 after." in held
    missed = page_of({"a": 1.9}, tmp_path, row(holds_back="the reason."))
    assert cells(missed, "speed") == ["speed", ">= 2", "1.9", "**missed**"]
    assert "* Missed, speed: the reason." in missed
    assert "where and when is not recorded" in missed


def test_a_row_without_a_target_has_no_verdict(tmp_path: Path) -> None:
    page = page_of({"a": 3, "b": 2}, tmp_path, Row("x", ratio("a", "b")))
    assert cells(page, "x") == ["x", "", "1.50 (3 / 2)", ""]
    assert cells(page, "[Area](#area)") == ["[Area](#area)", "0", "0", "0"]


def test_who_used_the_machine_and_which_options_are_told(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "load_average": [2.5, 0, 0], "arguments": ["--rounds", "1"]}
    page = page_of({"environment": environment, "a": 2}, tmp_path, row())
    assert "**other work ran on the machine**, options `--rounds 1`." in page


def test_what_is_not_measured_is_listed_with_its_reason(tmp_path: Path) -> None:
    page = page_of({"b": 1}, tmp_path, row(unmeasured="needs a checkout."))
    assert "* speed (`python -m benchmarks one --save`): needs a checkout." in page


@pytest.mark.parametrize("damaged", [None, "3", True, [], {}, float("nan"), float("inf")])
def test_what_is_no_number_is_not_measured(damaged: Json) -> None:
    with pytest.raises((TypeError, ValueError)):
        number({"a": damaged}, "a")


@pytest.mark.parametrize(
    ("target", "found", "verdict"),
    [
        ("<= 1,000 us", 1000.0, True),
        ("< 1", 1.0, False),
        ("flat: <= 1.05", 1.06, False),
        ("all >= 1", 1.0, True),
        ("> 0.5 %", 0.5, False),
        ("0", 0, True),
        ("0", 2, False),
        ("none", True, True),
        ("p50 < 1, p99 < 1.5", False, False),
        ("", 3.0, None),
        ("<= 3", None, None),
    ],
)
def test_a_target_is_judged_by_its_text(
    target: str, found: float | bool | None, verdict: bool | None
) -> None:
    assert Row("x", value("a"), target).is_kept(Found("", found)) is verdict


def test_a_place_is_keys_indices_and_values_of_a_row(tmp_path: Path) -> None:
    rows = [{"name": "a, b", "size": 1, "us": {"p50": 2.0}}, {"name": "a", "size": 1}]
    assert at({"rows": rows}, "rows > name=a, b, size=1 > us", "p50") == 2.0
    assert at({"rows": rows}, "rows > -1 > name") == "a"
    with pytest.raises(LookupError):
        at({"rows": rows}, "rows > name=a, size=2")
    page = page_of({"rows": rows}, tmp_path, Row("x", told("rows > 0", "{us[p50]:.1f} us")))
    assert cells(page, "x") == ["x", "", "2.0 us", ""]


def test_a_ratio_over_nothing_is_not_measured(tmp_path: Path) -> None:
    page = page_of({"a": 3, "b": 0}, tmp_path, Row("x", ratio("a", "b")))
    assert cells(page, "x")[-1] == "not measured"


def test_a_bar_in_a_figure_breaks_no_table(tmp_path: Path) -> None:
    page = page_of({}, tmp_path, Row("x", lambda _: Found("a|b", True), "all"))
    assert "| x | all | a\\|b | yes |" in page


def test_links_to_the_log_lead_to_headings() -> None:
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    headings = {line.removeprefix("## ") for line in log.splitlines() if line.startswith("## ")}
    assert {heading for subject in SUBJECTS for heading in subject.log} <= headings
    assert (
        anchor("2026-11-21: a dead sender's last bytes") == "2026-11-21-a-dead-senders-last-bytes"
    )


def test_every_measurement_and_the_code_that_it_speaks_of_are_there() -> None:
    modules = [one.module.replace(".", "/") + ".py" for one in MEASUREMENTS]
    paths = [path for one in MEASUREMENTS for path in one.code.split()]
    assert [path for path in (*modules, *paths) if not (ROOT / path).exists()] == []
    names = [one.name for one in MEASUREMENTS]
    assert len(set(names)) == len(names)


def test_every_headline_is_answered_from_a_file_that_has_rows() -> None:
    page = write(SUBJECTS, ROOT, HEADLINES)
    assert len(HEADLINES) == 10
    assert {headline.source for headline in HEADLINES} <= {source.name for source in SOURCES}
    answers = [cells(page, headline.question)[1] for headline in HEADLINES]
    assert "not measured" not in answers


def test_results_older_than_their_code_are_marked(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
        done = subprocess.run(
            ["git", *names, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    revisions: list[str] = []
    for name in ("engine.py", "other.py", "engine.py"):
        (tmp_path / name).write_text(str(len(revisions)), encoding="utf-8")
        git("add", ".")
        git("commit", "-q", "-m", name)
        revisions.append(git("rev-parse", "--short", "HEAD"))
    marks = [revisions[0], f"{revisions[0]}+", revisions[1], revisions[2], "unknown"]
    found = [count_changes(tmp_path, "engine.py", {"git_revision": mark}) for mark in marks]
    assert found == [1, 0, 1, 0, 0]
    (tmp_path / RESULTS).mkdir(parents=True)
    document = {"environment": ENVIRONMENT, "a": 2}
    (tmp_path / RESULTS / "one.json").write_text(json.dumps(document), encoding="utf-8")
    page = write([subject_of(Source("one", (row(),)))], tmp_path, (), lambda one, where: 3)
    assert (
        "2 cores, load average 0.5 before, 1.5 after, **its code has changed since** in 3" in page
    )
    assert "changed since**" not in CHANGES.sub("", page.partition("## Area")[2])
    assert "earlier runs" not in page
    when = {"date": "2026-11-01T02:03:04+00:00", "git_revision": "abc"}
    document["of_parts"] = {"new": ENVIRONMENT, "old": when}
    (tmp_path / RESULTS / "one.json").write_text(json.dumps(document), encoding="utf-8")
    page = write([subject_of(Source("one", (row(),)))], tmp_path, (), lambda one, where: 0)
    assert "; measured by earlier runs: old (abc, 2026-11-01 02:03 UTC)." in page


GPU_PARTS: dict[str, dict[str, object]] = {
    "ops": {"ok": True},
    "engine": {"ok": True},
    "graphs": {"ok": True},
    "split": {"ok": False, "not run": "no module nixl"},
    "decode": {
        "8B, batch 1: floor / measured": 0.8,
        "8B, batch 8: floor / measured": 0.74,
        "0.6B, batch 1: ms per step": 0.9,
        "0.6B, batch 256: idle": 0.02,
    },
    "nano": {"failed": "exit code 1", "output tokens per second": 22_000.0},
    "push": {
        "copy on the device, GB/s of payload": 2000.0,
        "blocks of 16 tokens, in a row: GB/s": 1100.0,
        "blocks of 16 tokens, in a row: ms": 0.6,
        "blocks of 128 tokens, in a row: ms": 0.5,
    },
    "kernels": {
        "stream: copy": "GB/s 4000.0, of copy 1.0",
        "stream: silu_mul": "GB/s 3800.0, of copy 0.95",
        "stream: add_rms_norm": "GB/s 3500.0, of copy 0.88",
        "launch: silu_mul, 64 tokens": "us 2.1, torch us 6.3, torch / ours 3.0",
        "sampling: top-k 50, top-p 0.9, 64 rows": "us 80.0, torch us 990.0, torch / ours 12.4",
    },
    "attention": {
        "decode 32/8, batch 1, context 1024": "us 9.0, best library sdpa, of copy 0.1",
        "decode 32/8, batch 64, context 4096": "us 500.0, library / ours 1.1, of copy 0.93",
        "prefill 2048 behind 0": "us 90.0, best library cudnn, library / ours 0.8, TFLOP/s 400.0",
        "decode, library / ours": 1.05,
    },
    "company": {"ok": True},
    "invariant": {
        "as usual, batch 1: ms per step": 5.0,
        "as usual, batch 8: ms per step": 5.0,
        "as usual, prompt: ms": 30.0,
        "batch-invariant, batch 1: ms per step": 5.5,
        "batch-invariant, batch 8: ms per step": 5.2,
        "batch-invariant, prompt: ms": 60.0,
    },
}


def test_the_gpu_suite_is_read_as_it_writes(tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir(parents=True)
    environment = {**ENVIRONMENT, "gpu": "Some GPU"}
    document = {"environment": environment, "device": "cuda", "parts": GPU_PARTS}
    (tmp_path / RESULTS / "gpu_suite.json").write_text(json.dumps(document), encoding="utf-8")
    page = write([gpu.SUBJECT], tmp_path)
    assert "Some GPU" in page
    shown = {row.what: cells(page, row.what)[2:] for row in gpu.SUITE.rows}
    assert [shown[row.what] for row in gpu.SUITE.rows] == [
        ["ops yes, engine yes, graphs yes, split not run", "**missed**"],
        ["0.93 to 0.93", "yes"],
        ["1.05", "yes"],
        ["0.80 to 0.80", "yes"],
        ["0.88 to 0.95", "**missed**"],
        ["3.0 to 3.0", "yes"],
        ["12.4", "yes"],
        ["0.80", "yes"],
        ["0.74", "**missed**"],
        ["", "not measured"],
        ["0.90 ms", "yes"],
        ["22,000 tok/s", "yes"],
        ["2.0 %", "yes"],
        ["0.55 (1100 / 2000 GB/s)", "yes"],
        ["1.20", "**missed**"],
        ["yes", "yes"],
        ["1.10", "**missed**"],
        ["1.04", "yes"],
        ["", "not measured"],
        ["2.00", "**missed**"],
    ]


@pytest.mark.parametrize(("rate", "verdict"), [(110.0, "yes"), (101.0, "**missed**")])
def test_an_engine_is_compared_with_the_best_beside_it(
    rate: float, verdict: str, tmp_path: Path
) -> None:
    document = {
        "tokens_per_second": {"baton": {"prefill 512": rate}},
        "ratio_to_best_peer": {"float32": {"prefill 512": rate / 100}},
        "share_of_limit": {"baton": {"prefill 512": 0.9}},
    }
    page = page_of(document, tmp_path, *ENGINE_CPU[0].rows)
    row = "prefill of 512 tokens, float32: tokens/s divided by the best peer's"
    assert cells(page, row)[2:] == [f"{rate / 100:.2f} ({rate} tok/s)", verdict]
    rate_of = "FLOP rate divided by that of one large float32 matrix multiplication"
    assert cells(page, f"prefill of 512 tokens, float32: {rate_of}")[3] == "yes"


@pytest.mark.parametrize(("high", "verdict"), [(-0.001, "yes"), (0.004, "**missed**")])
def test_a_split_is_not_better_while_its_interval_has_0_in_it(
    high: float, verdict: str, tmp_path: Path
) -> None:
    def one(name: str, seconds: float) -> dict[str, object]:
        return {"name": name, "metrics": {"itl_p99_s": {"mean": seconds}}}

    document = {
        "deployments": [one("1:1", 0.1), one("colocated:2", 0.2)],
        "verdict": {
            "answer": "undecided",
            "split": "1:1",
            "colocated": "colocated:2",
            "ratios": {"itl_p99_s": 0.5},
            "differences": {"itl_p99_s": {"low": -0.2, "high": high}},
        },
        "exit_code": 3,
    }
    page = page_of(document, tmp_path, *COMPARE.rows)
    shown = f"0.50 (100.00 / 200.00 ms; difference -200.00 to {1e3 * high:+.2f})"
    assert cells(page, "ITL p99: best split / best colocated")[2:] == [shown, verdict]
    assert cells(page, "verdict by goodput")[2] == "undecided: 1:1 against colocated:2"
    assert cells(page, "the load generator kept up")[2:] == ["no (exit code 3)", "**missed**"]
