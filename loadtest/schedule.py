"""Schedule: does the faults of a run when their times come, and looks for what they left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loadtest.audit import Auditor, BlockAudit
from loadtest.clock import RunClock
from loadtest.faults import Fault, FaultEvent
from loadtest.site import Site

FREE_TIMEOUT_S = 10.0


class Schedule:
    """One run's.

    Args:
        faults: in order of their times; they may overlap.
        auditor: None: blocks are not looked at.

    Attributes:
        events: what has been done.
        audit: after the last request.
    """

    def __init__(self, faults: Sequence[Fault], site: Site, auditor: Auditor | None) -> None:
        self._faults = faults
        self._site = site
        self._auditor = auditor
        self._orphans: dict[int, int] = {}  # by place among the faults
        self._done: dict[int, FaultEvent] = {}
        self.audit: BlockAudit | None = None

    @property
    def events(self) -> list[FaultEvent]:
        return [
            FaultEvent(
                fault=event.fault,
                began_s=event.began_s,
                ended_s=event.ended_s,
                num_orphans=self._orphans.get(place),
            )
            for place, event in sorted(self._done.items())
        ]

    async def play(self, clock: RunClock) -> None:
        """All of them; cancelled, those that have begun are undone."""
        async with asyncio.TaskGroup() as group:
            for place, fault in enumerate(self._faults):
                group.create_task(self._do(place, fault, clock))

    async def _do(self, place: int, fault: Fault, clock: RunClock) -> None:
        if place and self._auditor is not None:
            await clock.sleep_until(max(fault.begin_s - 0.5, 0.0))
            self._orphans[place - 1] = (await self._auditor.look()).num_orphans
        self._done[place] = await self._site.do(fault, clock)

    async def finish(self) -> None:
        """After the last request."""
        if self._auditor is None:
            return
        self.audit = await self._auditor.look_until_free(FREE_TIMEOUT_S)
        if self._faults:
            self._orphans[len(self._faults) - 1] = self.audit.num_orphans
