"""Engines that a test killed in the middle of their work: nobody can ask their blocks back."""

from __future__ import annotations

from weakref import WeakSet

from engine.core.scheduler import Scheduler
from engine.engine import Engine

_dead: WeakSet[Scheduler] = WeakSet()


def let_die(engine: Engine) -> None:
    """Treat this engine's process as ended, for its test."""
    _dead.add(engine._scheduler)


def died_on_purpose(scheduler: Scheduler) -> bool:
    return scheduler in _dead
