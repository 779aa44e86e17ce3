"""Executes `baton loadtest compare`: plays the comparison, prints and writes the results."""

from __future__ import annotations

import asyncio

from rich.console import Console

from baton.processes.process import print_error, stop_event
from loadtest.compare import Comparison, Trial, play_comparison
from loadtest.execute import judge, shown
from loadtest.exit_codes import EXIT_STOPPED
from loadtest.report.outputs import Outputs
from loadtest.report.report import WIDTH, plain
from loadtest.report.report_compare import comparison_to_json, print_comparison, trial_line
from loadtest.report.verdict import values_of
from loadtest.targets.base import TargetOptions


async def execute_comparison(
    comparison: Comparison, options: TargetOptions, outputs: Outputs
) -> int:
    """Run the comparison and return the exit code; raises BatonError."""
    outputs.check()
    console = Console(width=WIDTH, highlight=False)

    def show(trial: Trial) -> None:
        console.print(trial_line(trial), soft_wrap=True)

    stop = stop_event(asyncio.get_running_loop())
    trials = await play_comparison(comparison, options, stop, show)
    if trials:
        print_comparison(comparison, values_of(comparison.deployments, trials), console)
        outputs.write(plain(comparison_to_json(comparison, trials, shown(options))))
    if stop.is_set():
        print_error("the comparison was stopped before its end")
        return EXIT_STOPPED
    return judge([trial.result for trial in trials])
