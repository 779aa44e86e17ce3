"""Unit tests of grammar checks: results are remembered, only for the client who asked."""

from __future__ import annotations

import asyncio

from baton.api.structured_output import StructuredOutput
from baton.text.grammar_trials import GrammarTrials
from router.intake.grammar_checks import GrammarChecks
from tests.fakes.router.http_scene import TOKENIZER
from tests.fakes.router.router_scene import asynchronous


class NotingTrials(GrammarTrials):
    """Notes who asks, and never gets to those of "busy"."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER.folder)
        self.callers: list[str] = []

    async def run(self, structured_output: StructuredOutput, *, caller: str = "") -> None:  # type: ignore[override]  # nobody looks at what comes back
        self.callers.append(caller)
        if caller == "busy":
            await asyncio.Event().wait()


@asynchronous
async def test_no_tenant_learns_or_waits_for_what_another_one_asked() -> None:
    trials = NotingTrials()
    checks = GrammarChecks(trials)
    wanted = StructuredOutput(regex="a+")
    busy = asyncio.create_task(checks.check(wanted, caller="busy"))
    await asyncio.sleep(0)
    await asyncio.wait_for(checks.check(wanted, caller="b"), 5)
    await checks.check(wanted, caller="b")
    await checks.check(wanted, caller="c")
    assert trials.callers == ["busy", "b", "c"]
    busy.cancel()
    checks.close()
