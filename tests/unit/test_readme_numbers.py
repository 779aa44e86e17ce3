"""The numbers of README and the quickstart are those of the results files that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


def results(name: str) -> Any:
    assert f"(benchmarks/results/{name}.json)" in PAGE + QUICKSTART.replace("../", "")
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_what_is_left_after_a_prefill() -> None:
    modes = results("handoff")["push"]["modes"]["16384 tokens"]
    layers, after = (modes[mode]["exposed_transfer_ms"] for mode in ("layers", "after-prefill"))
    assert f"| {layers:.2f} ms | from the end of a prefill of 16,384 tokens" in PAGE
    assert f"{after:.2f} ms when it is sent afterwards" in PAGE


def test_how_many_drills_ended_well() -> None:
    drills = results("chaos")["drills"]
    well = sum(not drill["broken"] for drill in drills.values())
    assert f"| {well} of {len(drills)} |" in PAGE


def test_how_far_quantized_files_are_from_float32() -> None:
    files = results("divergence")["files"]
    ratios = [one["kl_ratio"] for one in files.values()]
    assert f"| {min(ratios):.2f} to {max(ratios):.2f} | Baton's divergence" in PAGE
    assert f"the same {len(files)} GGUF files" in PAGE


def test_what_an_installation_takes() -> None:
    extras = results("install_sizes")["extras"]
    pattern = rf"^\| `\.` \|.*\| {extras['core']['megabytes']} \|$"
    assert re.search(pattern, QUICKSTART, re.MULTILINE)
    node = extras["node"]
    assert f"| {node['megabytes']:,} more; torch (CPU build) takes " in QUICKSTART
    assert f" {node['largest']['torch']} of them |" in QUICKSTART
    assert f"| {extras['report']['megabytes']} more |" in QUICKSTART
