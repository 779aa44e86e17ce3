"""Progress: shows a run's state, updated each second, if the output is a terminal."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadtest.load.player import Player
from loadtest.plan import LoadPlan
from loadtest.report.distribution import distribution

_EVERY_S = 1.0
_LAST_LOOKS = 100  # number of lag measurements in one second


async def show_progress(plan: LoadPlan, player: Player, console: Console) -> None:
    """Show the progress of a run until cancelled."""
    if not console.is_terminal:
        return
    before_tokens = 0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(_EVERY_S)
            line = progress_line(plan, player, (player.num_tokens - before_tokens) / _EVERY_S)
            live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            before_tokens = player.num_tokens


def progress_line(plan: LoadPlan, player: Player, tokens_per_s: float) -> str:
    """Format the line about a run's progress; usual numbers fit into 80 columns."""
    now_s = player.clock.now_s()
    phase = "warm-up" if now_s < plan.warmup_s else "measuring"
    when = f"{now_s:.0f} s {phase}"
    if plan.duration_s is not None:
        when = f"{now_s:.0f} of {plan.duration_s:.0f} s {phase}"
        if now_s > plan.duration_s:
            when = f"{plan.duration_s:.0f} s and {now_s - plan.duration_s:.0f} s draining"
    lag = distribution(player.loop_lag.lags_s[-_LAST_LOOKS:])
    lag_ms = 0.0 if lag is None else lag.p99 * 1e3
    return (
        f"{when}: {len(player.records)} sent, {player.num_open} open, "
        f"{player.num_errors} failed, {tokens_per_s:.0f} tokens/s, lag {lag_ms:.1f} ms"
    )
