"""Schedule: carries out the faults of a run on time, and looks for leaked blocks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from loadtest.drills.audit import Auditor, Block, BlockAudit, Look
from loadtest.drills.faults import Fault, FaultEvent
from loadtest.drills.site import Site
from loadtest.load.clock import RunClock

FREE_TIMEOUT_S = 10.0
_LOOK_BEFORE_S = 0.5


class Schedule:
    """Causes the faults of one run, and audits the nodes' KV blocks before each and at the end.

    Args:
        faults: faults in order of their times; they may overlap.
        auditor: audits the nodes' KV blocks; None: no audits.

    Attributes:
        events: the faults that were carried out.
        audit: the audit after the last request; None: none was made.
    """

    def __init__(self, faults: Sequence[Fault], site: Site, auditor: Auditor | None) -> None:
        self._faults = faults
        self._site = site
        self._auditor = auditor
        # Audits by index of the fault that follows; the last audit is made after the run.
        self._looks: dict[int, Look] = {}
        self._done: dict[int, FaultEvent] = {}
        self.audit: BlockAudit | None = None

    @property
    def events(self) -> list[FaultEvent]:
        leaks = self._leaks()
        return [
            dataclasses.replace(
                event,
                num_orphans=look.audit.num_orphans if look is not None else None,
                num_leaked=leaks.get(place),
            )
            for place, event in sorted(self._done.items())
            for look in (self._looks.get(place + 1),)
        ]

    def _leaks(self) -> dict[int, int]:
        """Count blocks that never became free, by index of the fault that they followed."""
        if self.audit is None:
            return {}
        *_, last = (look for _, look in sorted(self._looks.items()))
        leaks: dict[int, int] = {}
        seen: set[Block] = set()
        for place, look in sorted(self._looks.items()):
            # After the run no request runs, so any held block is a leak, whatever the state of its
            # request.
            new = (last.held if look is last else look.stale & last.held) - seen
            seen |= new
            # An audit proves that nothing leaks only if all nodes answered
            if new or not self.audit.problems:
                leaks[place - 1] = len(new)
        return leaks

    async def play(self, clock: RunClock) -> None:
        """Cause all faults at their times; if cancelled, undo the faults that have begun."""
        async with asyncio.TaskGroup() as group:
            for place, fault in enumerate(self._faults):
                group.create_task(self._do(place, fault, clock))

    async def _do(self, place: int, fault: Fault, clock: RunClock) -> None:
        if self._auditor is not None:
            await clock.sleep_until(max(fault.begin_s - _LOOK_BEFORE_S, 0.0))
            self._looks[place] = await self._auditor.look()
        self._done[place] = await self._site.do(fault, clock)

    async def check_leaks(self) -> None:
        """Make the audit after the last request, which finds leaked blocks."""
        if self._auditor is None:
            return
        last = await self._auditor.look_until_free(FREE_TIMEOUT_S)
        self._looks[max(self._done, default=-1) + 1] = last
        self.audit = last.audit
