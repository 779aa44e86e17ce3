"""Player: plays a plan's requests against a target and records the answers.

In an open loop or a trace, a conversation begins at its planned time, whatever the server does. In
a closed loop, a user's next conversation begins one pause after the user's last answer. In both, a
later turn is sent one pause after the previous answer. An error or a cancelled request ends a
conversation early. The player only measures; `summary.py` computes the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from loadtest.load.clock import LoopLag, RunClock
from loadtest.load.lookahead import Lookahead, Prepared, PreparedConversation
from loadtest.load.record import Outcome, RequestRecord
from loadtest.load.workload import planned_conversations
from loadtest.plan import ClosedLoop, LoadPlan
from loadtest.targets.base import Target, TargetError

Beside = Callable[[RunClock], Coroutine[Any, Any, None]]


class Player:
    """Plays one run: call `prepare` once, then `play` once.

    Args:
        now: returns monotonic seconds.

    Attributes:
        records: records of all requests in the order of sending.
        num_open: number of requests that wait for the end of their answers.
        was_stopped: whether the user or a signal ended the run early.
    """

    def __init__(
        self, plan: LoadPlan, target: Target, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._plan = plan
        self._target = target
        self.clock = RunClock(now)
        self.loop_lag = LoopLag(self.clock)
        self.records: list[RequestRecord] = []
        self.num_open = 0
        self.num_ended = 0
        self.num_errors = 0
        self.num_tokens = 0
        self.was_stopped = False
        self._lookahead = Lookahead(planned_conversations(plan), target, plan.vocab_size)
        self._calls: set[asyncio.Task[object]] = set()
        self._broken: asyncio.Future[BaseException]

    def prepare(self) -> None:
        """Prepare the first conversations, which takes a while; raises ConfigError."""
        self._lookahead.fill()

    async def play(self, stop: asyncio.Event, beside: Beside | None = None) -> None:
        """Play until all answers have ended, or the drain timeout, or ``stop``; raises ConfigError.

        Args:
            beside: a job that starts with the run and is cancelled at its end.
        """
        self.clock.start()
        self._broken = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(self.loop_lag.watch())
        stopping = asyncio.create_task(stop.wait())
        sending = asyncio.create_task(self._send_all())
        others = [] if beside is None else [asyncio.create_task(beside(self.clock))]
        for other in others:
            other.add_done_callback(self._notice)
        try:
            await self._wait_for(sending, stopping)
            if sending.done():
                sending.result()
                answered = asyncio.gather(*self._calls, return_exceptions=True)
                await self._wait_for(answered, stopping, timeout_s=self._plan.drain_timeout_s)
            self.was_stopped = stopping.done()
        finally:
            await _end([sending, stopping, *others, *self._calls])
            await _end([watching])
        if self._broken.done():
            raise self._broken.result()

    async def _wait_for(
        self,
        what: asyncio.Future[Any],
        stopping: asyncio.Task[bool],
        timeout_s: float | None = None,
    ) -> None:
        """Wait until a task is done, the run is stopped, the player fails, or time is up."""
        await asyncio.wait(
            [what, stopping, self._broken],
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )

    async def _send_all(self) -> None:
        """Send all requests; return when no further request will be sent."""
        load, warmup_s = self._plan.load, self._plan.warmup_s
        if isinstance(load, ClosedLoop):
            for user in range(load.concurrency):
                self._start(self._be_user(warmup_s * user / load.concurrency))
            await asyncio.wait(self._calls, timeout=self._plan.duration_s)
            return
        in_turns: list[asyncio.Task[object]] = []
        while (prepared := self._lookahead.next_conversation()) is not None:
            due_s = prepared[0][0].due_s
            assert due_s is not None
            await self.clock.sleep_until(due_s)
            begun = self._start(self._converse(prepared, due_s))
            if len(prepared) > 1:
                in_turns.append(begun)
        if in_turns:  # wait while conversations may send further turns
            end_s = self._plan.duration_s
            left_s = None if end_s is None else max(end_s - self.clock.now_s(), 0)
            await asyncio.wait(in_turns, timeout=left_s)

    def _start(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        call = asyncio.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._forget)
        return call

    def _forget(self, call: asyncio.Task[object]) -> None:
        self._calls.discard(call)
        self._notice(call)

    def _notice(self, call: asyncio.Task[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        if error is not None and not self._broken.done():
            # A bug of the load test and not an error of the target, so `play` raises it
            self._broken.set_result(error)

    async def _be_user(self, due_s: float) -> None:
        """Play one conversation after another, as one user of a closed loop does."""
        end_s = self._plan.duration_s
        while end_s is None or due_s < end_s:
            prepared = self._lookahead.next_conversation()
            if prepared is None:
                return
            due_s = await self._converse(prepared, due_s)

    async def _converse(self, conversation: PreparedConversation, due_s: float) -> float:
        """Send a conversation's turns in order; return when its last answer ended.

        Turns that are due after the end of the run are not sent.
        """
        end_s = self._plan.duration_s
        for prepared in conversation:
            due_s += prepared[0].think_s
            if end_s is not None and due_s >= end_s:
                break
            await self.clock.sleep_until(due_s)
            record = await self._exchange(prepared, due_s)
            due_s = record.ended_s
            if record.outcome is not Outcome.OK:
                break
        return due_s

    async def _exchange(self, prepared: Prepared, due_s: float) -> RequestRecord:
        """Send one request, read its answer, and return the record of both."""
        request, payload = prepared
        clock = self.clock
        record = RequestRecord(request, due_s, clock.now_s())
        self.records.append(record)
        self.num_open += 1
        cancel_at = request.cancel_after_tokens
        try:
            async with (
                asyncio.timeout(self._plan.timeout_s),
                contextlib.aclosing(self._target.stream(payload)) as frames,
            ):
                async for frame in frames:
                    now_s = clock.now_s()
                    before = record.num_tokens
                    record.on_frame(frame, now_s)
                    self.num_tokens += record.num_tokens - before
                    if cancel_at is not None and record.num_tokens >= cancel_at:
                        record.set_outcome(Outcome.CANCELLED, now_s)
                        break
            if record.outcome is None:
                record.set_outcome(Outcome.OK, clock.now_s())
        except TargetError as error:
            record.set_outcome(Outcome.ERROR, clock.now_s(), error.kind, error.message)
        except TimeoutError:
            problem = f"no end within {self._plan.timeout_s:g} s"
            record.set_outcome(Outcome.ERROR, clock.now_s(), "TIMEOUT", problem)
        except asyncio.CancelledError:
            if self.was_stopped:  # the user ended the run, so the server is not at fault
                record.set_outcome(Outcome.CANCELLED, clock.now_s())
            else:
                problem = "no end before that of the run"
                record.set_outcome(Outcome.ERROR, clock.now_s(), "UNFINISHED", problem)
            raise
        finally:
            self.num_open -= 1
            self.num_ended += 1
            self.num_errors += record.outcome is Outcome.ERROR
        return record


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
