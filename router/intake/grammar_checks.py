"""GrammarChecks: whether a structured output can be had from this checkpoint, and within limits.

What was found is remembered, so that a schema costs each tenant its trial once. Knows no request.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput
from baton.text.grammar_trials import GrammarTrials

MAX_REMEMBERED = 1024
# One that was refused may have met a busy machine.
REFUSED_FOR_S = 60.0


@dataclass(slots=True)
class _Check:
    trial: asyncio.Task[None]
    began_at: float

    def may_be_asked(self, now: float) -> bool:
        """Whether what it says, or will say, still counts."""
        if not self.trial.done():
            return True
        if self.trial.cancelled():
            return False
        error = self.trial.exception()
        if error is None:
            return True
        return isinstance(error, InvalidRequestError) and now - self.began_at < REFUSED_FOR_S


class GrammarChecks:
    """Tries each grammar once, while it is remembered. One event loop's.

    Args:
        trials: of the checkpoint.
    """

    def __init__(self, trials: GrammarTrials) -> None:
        self._trials = trials
        # Least recently used first; by digest, for the texts are long.
        self._checks: OrderedDict[bytes, _Check] = OrderedDict()

    def start(self) -> None:
        """Start the worker processes now, so that the first grammar need not wait for them."""
        self._trials.start()

    async def prepare(self) -> None:
        """Wait until grammars can be tried, and try a few; raises NodeUnavailableError."""
        await self._trials.prepare()

    async def check(self, structured_output: StructuredOutput, *, caller: str = "") -> None:
        """Raise what `GrammarTrials.run` does if it cannot be had.

        Args:
            caller: who asks. What was found for others is not used: it would say in no time what
                they sent, and who asked for a thing first, behind much else, would hold up others.
        """
        digest = _digest(structured_output, caller)
        check = self._checks.get(digest)
        if check is None or not check.may_be_asked(time.monotonic()):
            trial = asyncio.create_task(self._try(structured_output, caller))
            trial.add_done_callback(_take_notice)
            check = self._checks[digest] = _Check(trial, time.monotonic())
        self._checks.move_to_end(digest)
        if len(self._checks) > MAX_REMEMBERED:
            self._checks.popitem(last=False)
        try:
            # One who goes away does not end it for the others.
            await asyncio.shield(check.trial)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.field, error.problem) from None

    async def _try(self, structured_output: StructuredOutput, caller: str) -> None:
        await self._trials.run(structured_output, caller=caller)  # what comes back is for nodes

    def close(self) -> None:
        """End the worker processes."""
        self._trials.close()


def _digest(structured_output: StructuredOutput, caller: str) -> bytes:
    found = hashlib.sha256(structured_output.kind.encode())
    for text in (caller, structured_output.text, *structured_output.choice):
        data = text.encode(errors="surrogatepass")
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


def _take_notice(trial: asyncio.Task[None]) -> None:
    """Of an error that nobody waits for any more."""
    if not trial.cancelled():
        trial.exception()
