"""Run one measurement, list all measurements, run the short suite, or write the page.

    python -m benchmarks --list
    python -m benchmarks NAME [options] [--save]
    python -m benchmarks --suite
    python -m benchmarks --page

A measurement is the function `run` of `benchmarks/SUBJECT/NAME.py`; `NAME --help` shows its
options. `--save` writes the results to `benchmarks/results/NAME.json`; `--page` writes
docs/performance.md from all saved results.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page.rows import Measurement
from benchmarks.page.write_performance import SUBJECTS, write_page
from benchmarks.runner.environment import ROOT
from benchmarks.runner.options import add_options, values_of
from benchmarks.runner.run import Run


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    if words[:1] == ["--page"]:
        write_page(ROOT)
        return 0
    if words[:1] == ["--suite"]:
        # Imported here because it needs rich, which a GPU machine may lack
        from benchmarks.runner import short_suite

        return short_suite.main(words[1:])
    if words[:1] == ["--list"]:
        print_list()
        return 0
    if words[:1] == ["--call"]:  # a measurement has started this child process
        module, _, function = words[1].partition(":")
        getattr(importlib.import_module(module), function)(*words[2:])
        return 0
    measurements = {one.name: one for subject in SUBJECTS for one in subject.measurements}
    if not words or words[0] not in measurements:
        print(__doc__, *measurements, file=sys.stderr)
        return 2
    return run_one(measurements[words[0]], words[1:])


def run_one(measurement: Measurement, words: Sequence[str]) -> int:
    """Run a measurement with the options in ``words``; return the exit code."""
    module: Any = importlib.import_module(measurement.module)
    if not hasattr(module, "run") or hasattr(module, "main"):
        sys.argv = [measurement.name, *words]
        return int(module.main() or 0)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {measurement.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    add_options(parser, module.run)
    found = parser.parse_args(words)
    run = Run(measurement, words, saves=found.save)
    return run.finish(module.run(run, **values_of(module.run, found)))


def print_list() -> None:
    """Print every measurement by subject, with the first line of its docstring."""
    for subject in SUBJECTS:
        print(f"\n{subject.title}")
        for one in subject.measurements:
            path = ROOT / Path(*one.module.split(".")).with_suffix(".py")
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            print(f"  {one.name:20} {text.splitlines()[0]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
