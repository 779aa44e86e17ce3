"""README's numbers are those of the results files that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def results(name: str) -> Any:
    assert f"(benchmarks/results/{name}.json)" in PAGE
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_what_is_left_after_a_prefill() -> None:
    modes = results("handoff")["push"]["modes"]["16384 tokens"]
    layers, after = (modes[mode]["exposed_transfer_ms"] for mode in ("layers", "after-prefill"))
    assert f"| {layers:.2f} ms | from the end of a prefill of 16,384 tokens" in PAGE
    assert f"({after:.2f} ms when it is sent afterwards)" in PAGE


def test_how_many_drills_ended_well() -> None:
    drills = results("chaos")["drills"]
    well = sum(not drill["broken"] for drill in drills.values())
    assert f"| {well} of {len(drills)} |" in PAGE


def test_what_splitting_brings_and_costs() -> None:
    found = results("compare")
    ratios = found["verdict"]["ratios"]
    assert found["plan"]["input_lengths"]["mean"] == 1500
    assert f"| {ratios['goodput_per_s']:.2f} times |" in PAGE
    assert f"takes {ratios['ttft_p50_s']:.2f} times as long" in PAGE


def test_what_an_installation_takes() -> None:
    extras = results("install_sizes")["extras"]
    assert re.search(rf"^\| `\.` \|.*\| {extras['core']['megabytes']} \|$", PAGE, re.MULTILINE)
    node = extras["node"]
    assert f"| {node['megabytes']:,} more, of them torch (its CPU build) " in PAGE
    assert f"{node['largest']['torch']} |" in PAGE
    assert f"| {extras['report']['megabytes']} more |" in PAGE
