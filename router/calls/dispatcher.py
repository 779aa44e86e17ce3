"""Dispatcher: admits calls, runs them on nodes, and forwards their tokens."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator

from baton.api.errors import BatonError, RequestCancelledError, error_of
from baton.api.outputs import FinishReason, Receipt, TextDelta
from baton.link.words import RequestError
from router.calls.call import Call
from router.calls.open_call import OpenCall
from router.calls.placing import Placer
from router.calls.recovery.recovery import Recoveries
from router.calls.request_log import Following, RequestLog
from router.calls.running_calls import RunningCalls, pass_gate
from router.calls.wake_ups import Turns, WakeUps
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission, make_admission
from router.policies.base import RoutingPolicy

logger = logging.getLogger(__name__)


class Dispatcher:
    """Runs calls on the nodes of one pool.

    Args:
        pool: the joined nodes and their links.
        policy: picks the nodes of each attempt.
        recoveries: decides about retries of failed attempts, for all calls.
        admission: decides when a call may begin; None: an `Admission` with default options.

    Attributes:
        placer: picks nodes; has the policy and the log of placements.
        log: records of the last calls.
        recoveries: decides about retries, and remembers calls that may have crashed nodes.
        turns: limits how many calls are checked or placed in one round of the event loop.
        wake_ups: wakes the readers of calls in waves.
        epochs: yields a new number for each attempt.
    """

    def __init__(
        self,
        pool: NodePool,
        policy: RoutingPolicy,
        recoveries: Recoveries | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.pool = pool
        self.recoveries = recoveries or Recoveries(pool)
        self.log = RequestLog()
        self.wake_ups = WakeUps()
        self.turns = Turns()
        self.admission = admission or make_admission(pool)
        self.placer = Placer(pool, policy, lambda: self.admission.num_queued)
        self._running = RunningCalls()
        self._open: dict[str, OpenCall] = {}  # by `Call.scoped_id`
        self._stopped: RequestError | None = None
        # Epochs must not repeat, even after a restart: a client may reuse a request id while nodes
        # still clean up the earlier call, and only the epoch tells the two calls apart.
        self.epochs: Iterator[int] = itertools.count(secrets.randbits(31))

    @property
    def num_open(self) -> int:
        """Number of calls that wait or are in progress."""
        return len(self._running)

    def count_adapter(self, digest: str) -> int:
        """Return the number of calls for an adapter that wait or are in progress."""
        return self._running.count_adapter(digest)

    async def run(self, call: Call) -> AsyncGenerator[TextDelta, None]:
        """Stream a call's tokens, without text; ending the iteration cancels the call on its nodes.

        Raises:
            NodeUnavailableError: no nodes were found, or too many attempts failed.
            OverloadedError: decode nodes ran out of memory too often.
            DeadlineExceededError: the call's deadline passed.
            PoisonRequestError: this call, or an earlier equal call, crashed nodes.
        """
        await self.turns.wait_for_turn()
        if self._stopped is not None:
            raise error_of(self._stopped)
        self.recoveries.suspects.check(call)
        self._running.add_call(call)
        try:
            with self.log.follow(call) as following:
                gate = pass_gate(self.admission, call, lambda: self._num_cached(call))
                async with gate as (admitted, ticket):
                    following.note_admitted()
                    with self._opened(admitted, following) as opened, ticket.noting(opened.receipt):
                        async with contextlib.aclosing(opened.outputs()) as outputs:
                            async for output in outputs:
                                if output.output_index == 0:
                                    self.admission.note_first_token(ticket)
                                following.note_output(output)
                                yield output
        finally:
            self._running.remove(call)

    def _num_cached(self, call: Call) -> int:
        """Return how many of the prompt's tokens are cached on the node that has most of them."""
        return max(self.pool.prefix_index.match_tokens(call.hashes).values(), default=0)

    @contextlib.contextmanager
    def _opened(self, call: Call, following: Following) -> Iterator[OpenCall]:
        """Keep an `OpenCall` registered and open while this context lasts.

        An error that ends the call gets the call's receipt.
        """
        opened = self._open[call.scoped_id] = OpenCall(
            call,
            following,
            pool=self.pool,
            placer=self.placer,
            recoveries=self.recoveries,
            wake_ups=self.wake_ups,
            turns=self.turns,
            epochs=self.epochs,
        )
        try:
            yield opened
        except BatonError as error:
            error.receipt = opened.receipt()
            raise
        finally:
            opened.close()
            del self._open[call.scoped_id]

    def note_ttft(self, call: Call) -> None:
        """Record the time to first token now, when the client receives the text of token 1."""
        self._open[call.scoped_id].note_ttft()

    def receipt(self, call: Call) -> Receipt:
        """Return the receipt of a call that ended at a stop string, and finish its log record."""
        opened = self._open[call.scoped_id]
        receipt = opened.receipt()
        opened.following.note_finished(FinishReason.STOP, receipt)
        return receipt

    def abort(self, request_id: str, why: str, *, tenant: str | None = None) -> bool:
        """Cancel a call, so that its client gets CANCELLED; return whether it was open.

        Raises the errors of `RunningCalls.find`.
        """
        call = self._running.find(request_id, tenant)
        if call is None:
            return False
        if self.admission.withdraw(call.scoped_id, RequestCancelledError(why)):
            return True
        opened = self._open.get(call.scoped_id)
        if opened is not None:
            opened.end_with_error(RequestError("CANCELLED", why))
            self.pool.note_eligibility_change()  # wakes the call if it waits for nodes
        return opened is not None

    def refuse_new(self, why: str) -> None:
        """Refuse new calls with UNAVAILABLE; open calls continue."""
        self._stopped = RequestError("UNAVAILABLE", why)

    def stop(self, why: str) -> None:
        """End all calls with UNAVAILABLE, and refuse new ones."""
        self.refuse_new(why)
        assert self._stopped is not None
        for scoped_id in self._running.ids():
            self.admission.withdraw(scoped_id, error_of(self._stopped))
        for opened in list(self._open.values()):
            opened.end_with_error(self._stopped)
        self.pool.note_eligibility_change()  # wakes calls that wait for nodes
