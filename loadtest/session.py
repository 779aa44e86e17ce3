"""Session: plays plans one after another against a target that stays open."""

from __future__ import annotations

import asyncio
import contextlib

from rich.console import Console

from loadtest.load.player import Beside
from loadtest.plan import LoadPlan
from loadtest.report.progress import show_progress
from loadtest.run import Run, RunResult
from loadtest.targets.base import Target


class Session:
    """Plays plans against an open target, which the session's owner closes.

    Args:
        stop: event that ends the current run when it is set from outside.
    """

    def __init__(self, target: Target, stop: asyncio.Event) -> None:
        self._target = target
        self._stop = stop

    async def play(self, plan: LoadPlan, beside: Beside | None = None) -> RunResult:
        """Play one run, and show its progress on a terminal; raises ConfigError."""
        run = Run(plan, self._target)
        showing = asyncio.create_task(show_progress(plan, run.player, Console(stderr=True)))
        try:
            return await run.execute(self._stop, beside)
        finally:
            showing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await showing
