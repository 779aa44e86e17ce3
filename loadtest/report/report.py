"""Reports of a run: a table of 80 columns for people, JSON, and a row of JSON per request."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baton.api.errors import ConfigError
from baton.telemetry.receipt_table import format_bytes
from loadtest.load.record import RequestRecord
from loadtest.report.distribution import PER_MILLE, Distribution
from loadtest.report.series import make_series
from loadtest.report.summary import LagReport, ReceiptReport, Summary
from loadtest.report.terms import LATENCY_NAMES
from loadtest.run import RunResult

WIDTH = 80
# Version of the JSON's format, raised when fields change their meaning or are removed.
JSON_FORMAT = 2
_COLUMNS = ("mean", *PER_MILLE, "max")
_SERVER = "server_ttft_s"  # latencies from here on come from receipts


def print_summary(result: RunResult, console: Console) -> None:
    """Print a run's table of latencies, the lines above and below it, and the warnings last."""
    summary = result.summary
    begin_s, end_s = summary.window_s
    parts = [f"{summary.num_requests} requests", f"{summary.num_ok} ok"]
    if summary.num_cancelled:
        parts.append(f"{summary.num_cancelled} cancelled by the client")
    if summary.errors:
        parts.append(f"{sum(summary.errors.values())} failed")
    console.print(f"{', '.join(parts)}; measured from {begin_s:.1f} s to {end_s:.1f} s")
    console.print(
        f"throughput: {summary.requests_per_s:.2f} of {summary.asked_per_s:.2f} requests/s, "
        f"{summary.output_tokens_per_s:.0f} output and "
        f"{summary.prompt_tokens_per_s:.0f} prompt tokens/s"
    )
    if summary.goodput_per_s is not None:
        limits = result.plan.slo.text()
        attained = "-" if summary.attainment is None else f"{summary.attainment:.1%}"
        console.print(
            f"goodput: {summary.goodput_per_s:.2f} requests/s within {limits}; attained {attained}"
        )
    if summary.latencies:
        console.print(_latency_table(summary))
    few = few_samples_line(summary.latencies)
    if few:
        console.print(few)
    if summary.receipts is not None:
        console.print(_receipt_line(summary.receipts))
    if summary.images is not None:
        console.print(summary.images.line())
        if summary.images.encodings is not None:
            console.print(summary.images.encodings.line(), soft_wrap=True)
    console.print(_token_line(summary))
    console.print(f"{summary.cache.line()}\nseed: {result.plan.seed}")
    warning = summary.cache.warning()
    if warning:
        console.print(f"warning: {warning}", style="red", soft_wrap=True)
    for kind, number in summary.errors.items():
        example = " ".join(summary.error_examples[kind].split())
        console.print(f"{number} x {kind}: {example}", style="red", overflow="ellipsis")
    console.print(_lag_line(summary.lag, result))


def empty_table(title: str) -> Table:
    """Make a table that is `WIDTH` characters wide; its first column is for names of rows."""
    table = Table(
        box=box.MINIMAL,
        padding=0,  # without padding: vertical lines separate the columns
        show_edge=False,
        width=WIDTH,
        title=title,
        title_justify="right",
        title_style="dim",
    )
    table.add_column("", no_wrap=True)
    return table


def _latency_table(summary: Summary) -> Table:
    table = empty_table("milliseconds")
    for column in _COLUMNS:
        table.add_column(column.replace("p999", "p99.9"), justify="right", no_wrap=True)
    for name, values in summary.latencies.items():
        if name == _SERVER:
            table.add_section()
        cells = (getattr(values, column) * 1e3 for column in _COLUMNS)
        table.add_row(
            LATENCY_NAMES[name], *(f"{cell:,.{1 if cell < 1000 else 0}f}" for cell in cells)
        )
    return table


def few_samples_line(latencies: Mapping[str, Distribution]) -> str:
    """Return a line that tells which percentiles equal the slowest value; empty if none does."""
    ttft = latencies.get("ttft_s")
    if ttft is None or ttft.count >= 1000:
        return ""
    same = "p99 and p99.9 are" if ttft.count < 100 else "p99.9 is"
    return f"of {ttft.count} requests {same} the slowest one"


def _receipt_line(receipts: ReceiptReport) -> str:
    line = (
        f"receipts: {receipts.num_receipts}; "
        f"{format_bytes(receipts.num_transferred_bytes)} transferred, "
        f"{receipts.num_retried} retried, {receipts.num_preemptions} preemptions"
    )
    if receipts.num_drafts:
        line += f", {receipts.num_accepted_drafts} of {receipts.num_drafts} drafts accepted"
    return line


def _token_line(summary: Summary) -> str:
    tokens = summary.tokens
    line = (
        f"tokens: {tokens.num_miscounted} of {tokens.num_checked} checked requests miscounted, "
        f"{tokens.num_short} shorter than asked for"
    )
    if tokens.num_estimated:
        line += (
            f"\n{tokens.num_estimated} requests did not say how many tokens their frames had: "
            "ITL is estimated"
        )
    return line


def _lag_line(lag: LagReport, result: RunResult) -> str:
    return (
        f"generator: lag p99 {_ms(lag.send)} when sending, {_ms(lag.loop)} of its loop "
        f"(at most {lag.limit_s * 1e3:g} ms)\ngenerator: {result.cpu_share:.2f} of a core used; "
        f"its machine has {result.environment.num_cpus}, load {result.load_average_at_end:.1f}"
    )


def _ms(values: Distribution | None) -> str:
    return "-" if values is None else f"{values.p99 * 1e3:.1f} ms"


def result_to_json(result: RunResult, target_options: dict[str, Any]) -> dict[str, Any]:
    """Convert a result to JSON, without its requests; durations are in seconds."""
    plan = dataclasses.asdict(result.plan)
    plan["load"] = {"kind": type(result.plan.load).__name__} | plan["load"]
    for name in ("input_lengths", "output_lengths"):
        plan[name] = {"kind": type(getattr(result.plan, name)).__name__} | plan[name]
    plan["turns"] = {"kind": type(result.plan.turns).__name__} | plan["turns"]
    plan["slo"] = dict(result.plan.slo.limits)
    summary = dataclasses.asdict(result.summary)
    summary["lag"]["kept_up"] = result.summary.lag.kept_up
    cache = result.summary.cache
    summary["cache"] |= {
        "cached_share": cache.cached_share,
        "shared_share": cache.shared_share,
        "warning": cache.warning(),
    }
    return {
        "format": JSON_FORMAT,
        "kind": "run",
        "plan": plan,
        "target": target_options | result.target,
        "environment": dataclasses.asdict(result.environment)
        | {
            "load_average_at_end": result.load_average_at_end,
            "generator_cpu_share": result.cpu_share,
        },
        "elapsed_s": result.elapsed_s,
        "was_stopped": result.was_stopped,
        "faults": [],
        "audit": None,
        "summary": summary,
        "series": dataclasses.asdict(
            make_series(result.plan, result.records, result.summary.window_s)
        ),
    }


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document as it would be after writing it to a JSON file and reading it."""
    found: dict[str, Any] = json.loads(json.dumps(document, default=str))
    return found


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the document; raises ConfigError if writing fails."""
    _write("json", path, [json.dumps(document, indent=2)])


def write_requests(path: Path, result: RunResult) -> None:
    """Write a line of JSON per request, also of the warm-up; raises ConfigError."""
    rows = map(_row, result.records)
    _write("save_requests", path, (json.dumps(row) for row in rows))


def _row(record: RequestRecord) -> dict[str, Any]:
    """Convert a request's record to JSON; times are in seconds since the run began."""
    assert record.outcome is not None
    return {
        "index": record.planned.index,
        "outcome": record.outcome.value,
        "error_kind": record.error_kind,
        "error": record.error,
        "finish_reason": record.finish_reason,
        "turn": record.planned.turn,
        "num_images": len(record.planned.images),
        "num_prompt_tokens": record.planned.prompt.num_tokens,
        "output_length": record.planned.output_length,
        "cancel_after_tokens": record.planned.cancel_after_tokens,
        "scheduled_s": record.scheduled_s,
        "sent_s": record.sent_s,
        "ended_s": record.ended_s,
        "num_output_tokens": record.num_tokens,
        "server_prompt_tokens": record.usage.num_prompt_tokens if record.usage else None,
        "server_output_tokens": record.usage.num_output_tokens if record.usage else None,
        "server_cached_tokens": record.usage.num_cached_tokens if record.usage else None,
        "tokens_are_counted": record.counted,
        "frame_times_s": [round(time_s, 6) for time_s in record.frame_times_s],
        "frame_tokens": record.frame_tokens.tolist(),
        "receipt": dataclasses.asdict(record.receipt) if record.receipt else None,
    }


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError, naming the option, unless a file can be written."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from error


def check_folder(option: str, path: Path) -> None:
    """Make a folder unless it exists; raises ConfigError naming the option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be made: {error.strerror}") from error


def _write(option: str, path: Path, lines: list[str] | Iterator[str]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from error
