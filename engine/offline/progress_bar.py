"""A progress bar on standard error, for calls of `LLM` with many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if ``shown``; yield a function that advances the bar."""
    if not shown:
        yield lambda num: None
        return
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda num: bar.advance(task, num)
