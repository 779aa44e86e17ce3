"""Writes the table by which a node chooses the backend for prompts, from GPU suite results.

    python -m tools.attention_table [RESULTS]

RESULTS is a file that `python -m benchmarks gpu_suite --save` or `gpu_first --save` wrote; by
default results/gpu_suite.json.
The rows of other GPUs stay in the table.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from baton_kernels.attention.measured import TABLE, MeasuredStep, read_table

RESULTS = Path("benchmarks/results/gpu_suite.json")
PARTS = ("attention", "library attention")  # parts of gpu_suite and of gpu_first
STEP = re.compile(r"step: (\d+)/(\d+) x (\d+), (\d+) of (\d+)")
TIME = re.compile(r"(?:^|, )(\w+) ([\d.]+)(?=,|$)")


def steps_in(document: dict[str, object]) -> list[MeasuredStep]:
    """Return the measured steps of the parts `PARTS`; empty if none was run."""
    environment, parts = document["environment"], document["parts"]
    assert isinstance(environment, dict)
    assert isinstance(parts, dict)
    steps: list[MeasuredStep] = []
    figures = [figure for part in PARTS for figure in parts.get(part, {}).items()]
    for key, text in figures:
        found = STEP.fullmatch(key)
        if found is None:
            continue
        heads, kv_heads, head_dim, new_tokens, seq_len = map(int, found.groups())
        us = {name: float(number) for name, number in TIME.findall(text)}
        steps.append(
            MeasuredStep(environment["gpu"], head_dim, heads // kv_heads, new_tokens, seq_len, us)
        )
    return steps


def main(path: Path = RESULTS) -> int:
    steps = steps_in(json.loads(path.read_text(encoding="utf-8")))
    if not steps:
        print(f"{path} has no attention steps", file=sys.stderr)
        return 1
    gpus = {step.gpu for step in steps}
    kept = [step for step in read_table() if step.gpu not in gpus]
    rows = sorted([*steps, *kept], key=lambda step: step[:5])  # times do not change the order
    text = json.dumps([step._asdict() for step in rows], indent=1)
    TABLE.write_text(text + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(rows)} steps of {len({step.gpu for step in rows})} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
