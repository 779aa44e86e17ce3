"""Faults: parses what is done to the server's processes during a run, and when.

    kill p0 @30s                        kill -9
    stop d0 @30-35s                     stopped for this time (SIGSTOP, SIGCONT)
    restart p0 @40s                     killed if it runs, and started again
    drop 1% of pushes @40-50s           writes of KV blocks fail ("of messages": messages are lost)
    inject delay=1ms-20ms on p0 @40-50s any spec that a node's --inject-faults accepts

Times are seconds since the run began; the warm-up is part of the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.errors import ConfigError

NOTATION = (
    'like "kill p0 @30s", "stop d0 @30-35s", "restart p0 @40s", "drop 1% of pushes @40-50s" '
    '(or "of messages", or "on p0") or "inject delay=20ms on p0 @40-50s"'
)
_NAME = r"[\w.-]+"
_FAULT = re.compile(
    rf"(?:(?P<act>kill|stop|restart) (?P<node>{_NAME})"
    rf"|drop (?P<percent>\d+(?:\.\d+)?)% of (?P<what>pushes|messages)(?: on (?P<on>{_NAME}))?"
    rf"|inject (?P<spec>\S+)(?: on (?P<into>{_NAME}))?)"
    r" @(?P<begin>\d+(?:\.\d+)?)s?(?:-(?P<end>\d+(?:\.\d+)?))?s"
)
_WHAT = {"pushes": "fail_post", "messages": "drop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to cause during a run, and its time.

    Attributes:
        act: kill, stop, restart or inject.
        node: name of the affected node; empty: all nodes.
        spec: the faults that a node injects, as for its --inject-faults.
        end_s: end of the fault; equal to ``begin_s`` if the fault has no duration.
        text: the fault as the user wrote it.
    """

    act: str
    node: str
    spec: str
    begin_s: float
    end_s: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a fault in the module's notation; raises ConfigError."""
        words = " ".join(text.split())
        match = _FAULT.fullmatch(words)
        if match is None:
            raise ConfigError(f"fault: must be {NOTATION}, got {text!r:.100}")
        begin_s = float(match["begin"])
        end_s = begin_s if match["end"] is None else float(match["end"])
        act = match["act"] or "inject"
        if (act in ("stop", "inject")) != (end_s > begin_s):
            wanted = "a time of its end" if act in ("stop", "inject") else "one time"
            raise ConfigError(f"fault: {act} must have {wanted}, after @, got {text!r:.100}")
        spec = match["spec"] or ""
        if match["percent"] is not None:
            share = float(match["percent"]) / 100
            if share > 1:
                raise ConfigError(f"fault: must be at most 100%, got {text!r:.100}")
            spec = f"{_WHAT[match['what']]}={share:g}"
        node = match["node"] or match["on"] or match["into"] or ""
        return cls(act=act, node=node, spec=spec, begin_s=begin_s, end_s=end_s, text=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent:
    """A fault that was carried out; times in seconds since the run began.

    Attributes:
        num_orphans: number of KV blocks without an owner, before the next fault or at the end;
            None: unknown.
        num_leaked: number of KV blocks that never became free, and that were first found stale
            (without an owner, or held for an ended request) between this fault and the next; None:
            unknown.
    """

    fault: Fault
    began_s: float
    ended_s: float
    num_orphans: int | None = None
    num_leaked: int | None = None


def check_schedule(faults: Sequence[Fault], duration_s: float | None) -> tuple[Fault, ...]:
    """Sort faults by their times; raises ConfigError for a fault after the run's end."""
    for fault in faults:
        if duration_s is None or fault.end_s >= duration_s:
            raise ConfigError(
                f"fault: must end before duration_s ({duration_s}), got {fault.text!r:.100}"
            )
    return tuple(sorted(faults, key=lambda fault: fault.begin_s))
