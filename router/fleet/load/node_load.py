"""NodeLoad: what the router knows of how busy one node is, and how fast. Policies read it.

    counted here   when a request is placed, begins, ends: at once, not when the node reports it
    reported       beats: what all routers' requests together do there
    measured       how long prompts and steps took: a `MeasuredLine` each

One writer: the `Node` it belongs to. Knows no policy: numbers, and no judgement of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.api.outputs import PrefillReceipt
from baton.link.words import NodeBeat, NodeRegistration, NodeRole
from router.fleet.load.forecast import ForecastCounts, PrefillForecast
from router.fleet.load.measured_line import MeasuredLine, Point
from router.fleet.load.promises import Promise, Promises

# Until something is measured, of nodes that do not tell their step times: one mid-range GPU with a
# model of some 8B parameters. Tokens of a prompt, and units of a step, with their seconds.
_PREFILL_GUESS = ((0.0, 0.01), (8000.0, 0.81))
_STEP_GUESS = ((0.0, 0.01), (100_000.0, 0.02))
# A request in a decode step costs about as much as so many tokens of context do.
REQUEST_UNITS = 500
# One measurement is the mean of so many steps: messages of a busy node come together or late.
STEPS_MEASURED_TOGETHER = 8
# Enough that batches of several sizes are among them: one size alone has no slope.
_STEPS_KEPT = 64
_SHARED_UNITS = (1.0 * REQUEST_UNITS, 8.0 * REQUEST_UNITS, 64.0 * REQUEST_UNITS)
_LONGEST_STEP_S = 1.0
_LONG_PROMPT = 4  # steps of most tokens: so long a prompt is part of a profile, too
# Seconds of a prompt while others decode on its node, over its seconds there alone: until measured,
# the highest that counts, and the weight of the newest measurement.
_FIRST_BESIDE, _MOST_BESIDE, _BESIDE_FADING = 2.0, 20.0, 0.2
_FADING = 0.05  # of averages, per measurement
_LONG_FADING = 0.01


@dataclass(slots=True)
class SharedRates:
    """What nodes measured together: where a new one starts. One per router.

    Attributes:
        output_tokens: that a request has, on average.
        long_output_tokens: that few requests exceed; follows long ones at once, others slowly.
        residence_s: that a request decodes, on average.
        kv_bytes_per_token: 0 while unknown.
        forecasts: how good those of prompts were.
    """

    prefill: MeasuredLine = field(default_factory=lambda: MeasuredLine(guess=_PREFILL_GUESS))
    step: MeasuredLine = field(
        default_factory=lambda: MeasuredLine(guess=_STEP_GUESS, num_kept=_STEPS_KEPT)
    )
    output_tokens: float = 200.0
    long_output_tokens: float = 200.0
    residence_s: float = 4.0
    kv_bytes_per_token: float = 0.0
    forecasts: ForecastCounts = field(default_factory=ForecastCounts)


@dataclass(slots=True, eq=False)
class Account:
    """What one open request counts for on one node; its `NodeLoad` alone writes here.

    Attributes:
        num_tokens: that count as open.
        num_uncomputed: prompt tokens that are to be computed here.
        num_arriving: prompt tokens whose KV takes room here and may come from elsewhere.
        num_decoding: of these, since it decodes here.
        is_beside: whether others were on this decode node when the request was placed.
        begun_at: when its first token on this decode node came; None before.
        promise: by when it has to end here, if it decodes here.
        forecast: expected times of the prompt; None where another node computes the prompt.
    """

    num_tokens: int
    num_uncomputed: int = 0
    num_arriving: int = 0
    num_decoding: int = 0
    is_beside: bool = False
    begun_at: float | None = None
    promise: Promise | None = None
    forecast: PrefillForecast | None = None


class NodeLoad:
    """One node's ledger. Policies and the gate read it as it is now, and change nothing.

    Args:
        shared: of this router.
        clock: seconds that never go back.

    Attributes:
        weight: share of its due that it is to get, above 0 to 1: less while it warms up.
        num_blocks: of its KV cache.
        max_model_len: most tokens of a request there.
        beat: how busy the node said it is, all routers' requests together.
        num_open_requests: placed there by this router and not finished there.
        num_open_tokens: prompt tokens not computed yet (prefill), or prompt tokens and those that
            may follow (decode), of these requests.
        num_uncomputed_requests: of these, whose prompt is to be computed there.
        num_placed_tokens: the same of all requests ever placed there.
        prefill: seconds per prompt, by its tokens that are computed.
        prefill_queue_s: that its open prompts take.
        prefill_base_s, prefill_s_per_token: that one more prompt takes until it is computed, of
            so many tokens; for a weight below 1 as if all took longer.
        prefill_front_s: of that, for the prompt in front; it may be computed in part.
        prefill_progress_at: when the last one was done, by the clock; of a node that was idle,
            when it got one.
        prefill_asked_at: when it got its last one; before the first, when it joined.
        beside_factor: seconds of a prompt while others decode there, over its seconds alone; above
            1, because its chunks are small and each shares a step with decodes.
        step: seconds per decode step, by `step_units`.
        step_units: context in tokens, and some more for each request.
        step_base_s, step_s_per_unit: of a step with one more request of so many units, and what
            all others lose by each step that is longer.
        num_batch: requests there, or on their way there.
        num_free_tokens: of KV, when all that is on its way has arrived; may be below 0.
        num_room_tokens: of the longest prompt that need not wait for room.
        shared: what all nodes of the router measured together.
    """

    def __init__(
        self,
        registration: NodeRegistration,
        shared: SharedRates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node_name = registration.node_name
        self.engine_id = registration.engine_id
        self.revision = registration.revision
        self.num_blocks = registration.num_blocks
        self.block_size = registration.block_size
        self.max_model_len = registration.max_model_len
        self.shared = shared or SharedRates()
        self._weight = 1.0
        self.beat = NodeBeat()
        self.num_open_requests = 0
        self.num_open_tokens = 0
        self.num_placed_tokens = 0
        self.num_arriving_tokens = 0
        self.prefill = MeasuredLine(_profile(registration), shared=self.shared.prefill)
        self.step = MeasuredLine(
            _decode_profile(registration),
            shared=self.shared.step,
            num_kept=_STEPS_KEPT,
            shared_units=_SHARED_UNITS,
        )
        self.beside_factor, self._num_beside = _FIRST_BESIDE, 0
        self.prefill_queue_s = 0.0
        self.prefill_base_s = self.prefill_s_per_token = self.prefill_front_s = 0.0
        self.prefill_progress_at = self.prefill_asked_at = clock()
        self.num_batch = 0
        self.step_units = 0.0
        self.step_base_s = self.step_s_per_unit = 0.0
        self.num_free_tokens = self.num_room_tokens = self.num_blocks * self.block_size
        self._is_decode = registration.role is NodeRole.DECODE
        self._clock = clock
        self.has_beat = False
        self._num_uncomputed = 0  # prompt tokens to be computed here, of requests placed from here
        self.num_uncomputed_requests = 0
        self._num_foreign = 0
        self._num_decoding = 0
        self._num_decoding_tokens = 0  # of the prompts of these
        self._foreign_units = self._foreign_running_units = 0.0
        self._stepped_at: float | None = None
        self._num_timed = 0  # steps that are to be measured together, and their sums
        self._timed_units = self._timed_s = 0.0
        self.promises = Promises()
        self._derive()

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = weight
        self._derive()

    # ------------------------------------------------------------------ counted

    def note_opened(
        self,
        num_tokens: int,
        *,
        num_uncomputed: int = 0,
        num_arriving: int = 0,
        promise: Promise | None = None,
    ) -> Account:
        """Count a request that was placed here; see `Account`."""
        forecast, is_beside = None, self.num_batch > 0
        if num_uncomputed:
            self.prefill_asked_at = now = self._clock()
            if not self.num_uncomputed_requests:
                self.prefill_progress_at = now
            forecast = self._forecast(num_uncomputed, now, self.beside_factor if is_beside else 1.0)
            self._num_uncomputed += num_uncomputed
            self.num_uncomputed_requests += 1
        self.num_open_requests += 1
        self.num_open_tokens += num_tokens
        self.num_placed_tokens += num_tokens
        self.num_arriving_tokens += num_arriving
        self._derive()
        return Account(
            num_tokens,
            num_uncomputed,
            num_arriving,
            is_beside=is_beside,
            promise=promise,
            forecast=forecast,
        )

    def _forecast(self, num_tokens: int, now: float, factor: float) -> PrefillForecast:
        """Return what is expected of a prompt, if computing takes so many times its own time."""
        begun_s = min(now - self.prefill_progress_at, factor * self.prefill_front_s)
        wait_s = max(factor * self.prefill_queue_s - begun_s, 0.0)
        return PrefillForecast(num_tokens, wait_s, factor * self.prefill.seconds(num_tokens), now)

    def _note_forecast(self, account: Account, now: float, compute_s: float) -> None:
        forecast, account.forecast = account.forecast, None
        if forecast is not None:
            forecast.measured_compute_s = compute_s
            forecast.measured_wait_s = max(now - forecast.placed_at - compute_s, 0.0)
            self.shared.forecasts.note(forecast)

    def note_computed(self, account: Account) -> None:
        """Count an open request's prompt as computed: it is no longer before this node."""
        self.num_open_tokens -= account.num_tokens
        account.num_tokens = 0
        self._drop_uncomputed(account)
        self._derive()

    def note_begun(self, account: Account) -> None:
        """Count a request as decoding: its KV is here, and its first token on this node came."""
        account.begun_at = self._clock()
        if account.num_uncomputed:
            busy_s = max(account.begun_at - self.prefill_progress_at, 0.0)
            self._note_forecast(account, account.begun_at, busy_s)
            if account.is_beside:
                self._note_beside(busy_s / self.prefill.seconds(account.num_uncomputed))
            else:
                self.prefill.measure(account.num_uncomputed, busy_s)
                self.prefill.refresh()
        if account.promise is not None:
            self.promises.begin(account.promise)
        account.num_decoding, account.num_arriving = account.num_arriving, 0
        self._num_decoding += 1
        self._num_decoding_tokens += account.num_decoding
        self.num_arriving_tokens -= account.num_decoding
        self._drop_uncomputed(account)
        self._derive()

    def _note_beside(self, factor: float) -> None:
        self._num_beside += 1
        part = max(1 / (1 + self._num_beside), _BESIDE_FADING)
        self.beside_factor += part * (min(max(factor, 1.0), _MOST_BESIDE) - self.beside_factor)

    def note_closed(self, account: Account) -> None:
        """Take back all that a request still counts for: it ended here."""
        self.num_open_requests -= 1
        self.num_open_tokens -= account.num_tokens
        self.num_arriving_tokens -= account.num_arriving
        self._num_decoding -= account.begun_at is not None
        self._num_decoding_tokens -= account.num_decoding
        if account.promise is not None:
            self.promises.close(account.promise)
        if not self._num_decoding:
            self._stepped_at = None  # a pause begins: the time until the next step is none
        self._drop_uncomputed(account)
        self._derive()

    def _drop_uncomputed(self, account: Account) -> None:
        if account.num_uncomputed:
            self._num_uncomputed -= account.num_uncomputed
            account.num_uncomputed = 0
            self.num_uncomputed_requests -= 1
            self.prefill_progress_at = self._clock()

    def note_stalled(self) -> None:
        """Look for progress from now on: what did not come until now has had its consequences."""
        self.prefill_progress_at = self._clock()

    @property
    def stalled_s(self) -> float:
        """For how long the prompts placed from here have not got on; 0 where there are none.

        Of other routers' prompts is not heard here when they are computed.
        """
        return self._clock() - self.prefill_progress_at if self.num_uncomputed_requests else 0.0

    # ------------------------------------------------------------------ reported and measured

    def note_beat(self, beat: NodeBeat) -> None:
        """A node's own account came."""
        self.beat = beat
        self.has_beat = True
        # What the node has to compute beyond what was placed from here: other routers' requests,
        # and prompts of which less was cached than thought.
        self._num_foreign = max(0, beat.num_uncomputed_tokens - self._num_uncomputed)
        self._note_foreign_units()
        self.prefill.refresh()
        self.step.refresh()
        self._derive()

    def _note_foreign_units(self) -> None:
        """What other routers' requests add to steps, when all run and now: as large as others."""
        beat = self.beat
        num_reported = beat.num_running + beat.num_waiting + beat.num_waiting_for_remote_kvs
        num_held_tokens = (self.num_blocks - beat.num_free_blocks) * self.block_size
        units = REQUEST_UNITS + num_held_tokens / max(num_reported, 1)
        self._foreign_units = units * max(0, num_reported - self.num_open_requests)
        self._foreign_running_units = units * max(0, beat.num_running - self._num_decoding)

    def note_prefilled(
        self, receipts: Sequence[PrefillReceipt], accounts: Sequence[Account] = ()
    ) -> None:
        """Measure the prompts whose last tokens one step computed, before they are no longer open.

        Each prompt is charged with the same part of the time since a step last ended prompts, and
        with the same part of all tokens. Nobody can tell which of them took the time, and the sum
        is the time that the node was busy.
        """
        computed = [receipt for receipt in receipts if receipt.num_computed_tokens > 0]
        now = self._clock()
        busy_s = now - self.prefill_progress_at
        busy_s = max(min(busy_s, max((r.prefill_s for r in computed), default=0.0)), 0.0)
        num_tokens = sum(min(one.num_computed_tokens, self.max_model_len) for one in computed)
        for _ in computed:
            self.prefill.measure(num_tokens / len(computed), busy_s / len(computed))
        for account in accounts:
            self._note_forecast(account, now, busy_s / max(len(computed), 1))
        self.prefill.refresh()
        self.prefill_progress_at = now

    def note_step(self) -> None:
        """The tokens of one decode step came.

        It is measured by what decodes now. By what is placed here, much of which is still on its
        way, the line would be flat, and a node that is thought not to mind gets all.
        """
        self.promises.num_steps += 1
        now = self._clock()
        step_s = math.inf if self._stepped_at is None else now - self._stepped_at
        has_prompts = self._num_uncomputed or self.beat.num_uncomputed_tokens
        if step_s < _LONGEST_STEP_S and not has_prompts:
            units = REQUEST_UNITS * self._num_decoding + self._num_decoding_tokens
            self._num_timed += 1
            self._timed_units += units + self._foreign_running_units
            self._timed_s += step_s
            if self._num_timed == STEPS_MEASURED_TOGETHER:
                self._measure_steps()
        self._stepped_at = now if self._num_decoding else None

    def _measure_steps(self) -> None:
        self.step.measure(self._timed_units / self._num_timed, self._timed_s / self._num_timed)
        self._num_timed = 0
        self._timed_units = self._timed_s = 0.0

    def note_decoded(self, num_tokens: int, residence_s: float, *, is_cut: bool = False) -> None:
        """A request ended after so long on this decode node.

        Args:
            num_tokens: of its output; a step may have sampled several of them.
            is_cut: it had all the tokens that it was allowed: longer ones may be as long as ever.
                (When few of these get in, they must not be forgotten.)
        """
        shared = self.shared
        num_tokens = min(num_tokens, self.max_model_len)
        shared.output_tokens += _FADING * (num_tokens - shared.output_tokens)
        faded = shared.long_output_tokens + _LONG_FADING * (num_tokens - shared.long_output_tokens)
        shared.long_output_tokens = max(num_tokens, shared.long_output_tokens if is_cut else faded)
        shared.residence_s += _FADING * (residence_s - shared.residence_s)

    # ------------------------------------------------------------------ derived

    def slack_s(self, now: float) -> float:
        """How long steps may pause for one prompt more before a deadline here is missed.

        Besides for the prompts that are before it. O(requests here).
        """
        return self.promises.slack_s(now, self.step_base_s) - self.prefill_queue_s

    def _derive(self) -> None:
        """What policies read; made when something changes, as more is read than changes."""
        beat = self.beat
        line, weight, num_requests = self.prefill, self._weight, self.num_uncomputed_requests
        self.prefill_queue_s = line.base * num_requests + line.per_unit * (
            self._num_uncomputed + self._num_foreign
        )
        self.prefill_base_s = (self.prefill_queue_s + line.base) / weight
        self.prefill_s_per_token = line.per_unit / weight
        self.prefill_front_s = self.prefill_queue_s / max(num_requests, 1) / weight
        if not self._is_decode:
            return
        num_reported = beat.num_running + beat.num_waiting + beat.num_waiting_for_remote_kvs
        self.num_batch = max(self.num_open_requests, num_reported)
        num_free = (beat.num_free_blocks if self.has_beat else self.num_blocks) * self.block_size
        self.num_free_tokens = num_free - self.num_arriving_tokens
        self.num_room_tokens = 0 if beat.num_waiting else self.num_free_tokens - self.block_size
        num_own_tokens = self.num_arriving_tokens + self._num_decoding_tokens
        own_units = REQUEST_UNITS * self.num_open_requests + num_own_tokens
        self.step_units = own_units + self._foreign_units
        step = self.step
        self.step_base_s = step.base + step.per_unit * self.step_units / weight
        # Others, too: on average they have half of their steps before them.
        self.step_s_per_unit = step.per_unit * (1 + self.num_batch / 2 / weight)


def _profile(registration: NodeRegistration) -> tuple[Point, ...]:
    """Return the node's step times, and what a prompt of several of its largest steps takes."""
    times = registration.step_times
    if len(times) < 2:
        return ()
    points = [(float(one.num_tokens), one.seconds) for one in times]
    most, seconds = points[-1]
    return (*points, (_LONG_PROMPT * most, _LONG_PROMPT * seconds))


def _decode_profile(registration: NodeRegistration) -> tuple[Point, ...]:
    """Return the node's decode steps by rising units; empty where they do not make a line."""
    seconds_of = {
        float(REQUEST_UNITS * one.num_requests + one.num_context_tokens): one.seconds
        for one in registration.decode_times
    }
    return tuple(sorted(seconds_of.items())) if len(seconds_of) > 1 else ()
