"""Engines that a test stops in the middle of their work, so that their blocks are never freed."""

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
