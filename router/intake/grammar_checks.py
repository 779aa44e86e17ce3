"""GrammarChecks: checks that the model's tokenizer can enforce a structured output within limits.

Results are remembered, so each tenant waits only once until a schema has been tried.
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
# A refusal is remembered for only this many seconds, because a busy machine may be its cause.
REFUSED_FOR_S = 60.0


@dataclass(slots=True)
class _Check:
    trial: asyncio.Task[None]
    began_at: float

    def may_be_asked(self, now: float) -> bool:
        """Return whether the result of this check may be used again."""
        if not self.trial.done():
            return True
        if self.trial.cancelled():
            return False
        error = self.trial.exception()
        if error is None:
            return True
        return isinstance(error, InvalidRequestError) and now - self.began_at < REFUSED_FOR_S


class GrammarChecks:
    """Tries each grammar once and remembers the result. Belongs to one event loop.

    Args:
        trials: compiles grammars for the checkpoint's tokenizer in worker processes.
    """

    def __init__(self, trials: GrammarTrials) -> None:
        self._trials = trials
        # Least recently used first, by digest, because the texts of grammars are long.
        self._checks: OrderedDict[bytes, _Check] = OrderedDict()

    def start(self) -> None:
        """Start the worker processes, so that the first grammar does not wait for them."""
        self._trials.start()

    async def prepare(self) -> None:
        """Wait until workers are ready and try a few grammars; raises NodeUnavailableError."""
        await self._trials.prepare()

    async def check(self, structured_output: StructuredOutput, *, caller: str = "") -> None:
        """Raise the errors of `GrammarTrials.run` if the output cannot be enforced.

        Args:
            caller: the tenant. Results for other tenants are not used: timing would reveal their
                schemas, and a tenant with a long queue would delay others with the same schema.
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
            # If the request that started the trial ends, the trial continues for other requests.
            await asyncio.shield(check.trial)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.field, error.problem) from None

    async def _try(self, structured_output: StructuredOutput, caller: str) -> None:
        # Only the trial's error matters, because nodes compile the grammar themselves.
        await self._trials.run(structured_output, caller=caller)

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
    """Read a trial's error, because asyncio would log it if no request waits for it any more."""
    if not trial.cancelled():
        trial.exception()
