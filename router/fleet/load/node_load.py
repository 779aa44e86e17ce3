"""NodeLoad: what the router knows of one node's load and speed, for policies to read.

    counted     requests that are placed, begin or end on the node
    reported    beats: the load by all routers' requests
    measured    how long prompts and steps take: one `MeasuredLine` each

Only the load's `Node` writes here. `NodeLoad` offers numbers and judges nothing.
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

# Assumed (prompt tokens, seconds) and (step units, seconds) of a node that reports no step times,
# until it is measured. The numbers fit one mid-range GPU with an 8B model.
_DEFAULT_PREFILL = ((0.0, 0.01), (8000.0, 0.81))
_DEFAULT_STEP = ((0.0, 0.01), (100_000.0, 0.02))
# In a decode step, a request costs about as much time as this many tokens of context.
REQUEST_UNITS = 500
# One measurement is the mean over this many steps, because a busy node's messages come in bursts.
STEPS_MEASURED_TOGETHER = 8
# Number of profiled steps that includes several batch sizes: one size alone yields no slope.
_STEPS_KEPT = 64
_SHARED_UNITS = (1.0 * REQUEST_UNITS, 8.0 * REQUEST_UNITS, 64.0 * REQUEST_UNITS)
_LONGEST_STEP_S = 1.0
_LONG_PROMPT = 4  # profiles are extended to prompts this many times as long as the largest step
# How many times longer a prompt takes while other requests decode on its node: the first assumed
# value, the highest value that counts, and the weight of the newest measurement.
_FIRST_BESIDE, _MOST_BESIDE, _BESIDE_FADING = 2.0, 20.0, 0.2
_FADING = 0.05  # weight of a new value in running averages
_LONG_FADING = 0.01


@dataclass(slots=True)
class SharedRates:
    """Rates that all nodes of a router have measured together; a new node starts with these rates.

    Attributes:
        output_tokens: mean output length of a request.
        long_output_tokens: length that few outputs exceed; rises at once, falls slowly.
        residence_s: mean time that a request decodes.
        kv_bytes_per_token: KV size of a token over all layers; 0: unknown.
        forecasts: how well prompts' times were forecast.
    """

    prefill: MeasuredLine = field(default_factory=lambda: MeasuredLine(default=_DEFAULT_PREFILL))
    step: MeasuredLine = field(
        default_factory=lambda: MeasuredLine(default=_DEFAULT_STEP, num_kept=_STEPS_KEPT)
    )
    output_tokens: float = 200.0
    long_output_tokens: float = 200.0
    residence_s: float = 4.0
    kv_bytes_per_token: float = 0.0
    forecasts: ForecastCounts = field(default_factory=ForecastCounts)


@dataclass(slots=True, eq=False)
class Account:
    """The load of one open request on one node; only the node's `NodeLoad` writes here.

    Attributes:
        num_tokens: what the request adds to the node's ``num_open_tokens``.
        num_uncomputed: prompt tokens to compute here.
        num_arriving: prompt tokens whose KV needs room here and has not arrived.
        num_decoding: prompt tokens of a request that decodes here; 0 before.
        is_beside: whether other requests were on this decode node when this request was placed.
        begun_at: when the request's first token came from this decode node; None before.
        promise: the request's deadline, if it decodes here.
        forecast: expected times of the prompt; None if another node computes it.
        unmeasured: number of tokens of a prompt that this decode node computed, and the seconds
            that the router measured, until the node reports its own time; None: nothing to measure.
    """

    num_tokens: int
    num_uncomputed: int = 0
    num_arriving: int = 0
    num_decoding: int = 0
    is_beside: bool = False
    begun_at: float | None = None
    promise: Promise | None = None
    forecast: PrefillForecast | None = None
    unmeasured: tuple[int, float] | None = None


class NodeLoad:
    """Tracks one node's load. Policies and the gate read it and change nothing.

    Args:
        shared: measurements of all nodes of this router.
        clock: returns monotonic seconds.

    Attributes:
        weight: share of its usual load that the node should get, above 0 up to 1; low during
            warm-up.
        num_blocks: size of the node's KV cache in blocks.
        max_model_len: longest request that the node accepts, in tokens.
        loads_adapters: whether the node can load adapters from files.
        encodes_images: whether the node can compute prompts with images.
        adapters: digests of the adapters in the node's memory.
        beat: the node's latest report of its load from all routers.
        num_open_requests: requests that this router placed on the node and that have not ended.
        num_open_tokens: on a prefill node, open requests' prompt tokens that are not computed yet;
            on a decode node, open requests' prompt tokens plus largest outputs.
        num_uncomputed_requests: open requests whose prompt the node must still compute.
        num_placed_tokens: tokens of all requests ever placed on the node, counted like
            ``num_open_tokens``.
        prefill: predicted seconds to compute a prompt, by its number of uncomputed tokens.
        prefill_queue_s: time to compute all open prompts.
        prefill_base_s, prefill_s_per_token: line of the time to compute one more prompt, by its
            tokens; scaled up for a weight below 1.
        prefill_front_s: the first prompt's part of ``prefill_queue_s``; may be partly done.
        prefill_progress_at: when the last prompt was done, or when the first prompt came to the
            idle node, by the clock.
        prefill_asked_at: when the last prompt was placed on the node, or when the node joined.
        beside_factor: how many times longer a prompt takes while other requests decode on the node;
            above 1, because its chunks are small and share their steps with decodes.
        step: seconds per decode step, by `step_units`.
        step_units: size of a step: context tokens, plus `REQUEST_UNITS` per request.
        step_base_s, step_s_per_unit: line of the cost per step of one more request, by its units:
            its own share of the step, and the delay of all other requests.
        num_batch: requests on the node, or on their way to the node.
        num_free_tokens: free room for KV in tokens, once all placed requests have arrived; may be
            negative.
        num_room_tokens: longest prompt that finds room without waiting.
        shared: measurements of all nodes of this router.
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
        self.loads_adapters = registration.loads_adapters
        self.encodes_images = registration.encodes_images
        self.adapters: frozenset[str] = frozenset()
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
        self._num_uncomputed = 0  # prompt tokens that this router's requests must compute here
        self.num_uncomputed_requests = 0
        self._num_foreign = 0
        self._num_foreign_requests = 0
        self._num_decoding = 0
        self._num_decoding_tokens = 0  # prompt tokens of the decoding requests
        self._foreign_units = self._foreign_running_units = 0.0
        self._stepped_at: float | None = None
        self._num_timed = 0  # steps of the current measurement, and their sums
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
        """Count a request that was placed here and return its `Account`."""
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
        """Return a prompt's forecast, if computing takes ``factor`` times as long as alone."""
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
        """Subtract an open request's computed prompt from this node's queue."""
        self.num_open_tokens -= account.num_tokens
        account.num_tokens = 0
        self._drop_uncomputed(account)
        self._derive()

    def note_begun(self, account: Account) -> None:
        """Count a request as decoding, because its KV is here and its first token came."""
        account.begun_at = self._clock()
        if account.num_uncomputed:
            busy_s = max(account.begun_at - self.prefill_progress_at, 0.0)
            self._note_forecast(account, account.begun_at, busy_s)
            if account.is_beside:
                self._note_beside(busy_s / self.prefill.seconds(account.num_uncomputed))
            else:
                account.unmeasured = account.num_uncomputed, busy_s
        if account.promise is not None:
            self.promises.begin_promise(account.promise)
        account.num_decoding, account.num_arriving = account.num_arriving, 0
        self._num_decoding += 1
        self._num_decoding_tokens += account.num_decoding
        self.num_arriving_tokens -= account.num_decoding
        self._drop_uncomputed(account)
        self._derive()

    def note_prompt_time(self, account: Account, own_s: float = math.inf) -> None:
        """Measure the prompt that this decode node computed, if there is one.

        The router's measurement includes the network time to the node and back. For a prompt with
        few uncomputed tokens this is most of the time, and would make long prompts look slower.

        Args:
            own_s: seconds until its first token, measured by the node; inf: not reported.
        """
        if account.unmeasured is not None:
            num_tokens, seconds = account.unmeasured
            account.unmeasured = None
            self.prefill.measure(num_tokens, min(seconds, own_s))
            self.prefill.refresh()

    def _note_beside(self, factor: float) -> None:
        self._num_beside += 1
        part = max(1 / (1 + self._num_beside), _BESIDE_FADING)
        self.beside_factor += part * (min(max(factor, 1.0), _MOST_BESIDE) - self.beside_factor)

    def note_closed(self, account: Account) -> None:
        """Subtract everything that an ended request still counts for from the load."""
        self.note_prompt_time(account)
        self.num_open_requests -= 1
        self.num_open_tokens -= account.num_tokens
        self.num_arriving_tokens -= account.num_arriving
        self._num_decoding -= account.begun_at is not None
        self._num_decoding_tokens -= account.num_decoding
        if account.promise is not None:
            self.promises.close(account.promise)
        if not self._num_decoding:
            # The node is idle now, so the time until the next token is not a step
            self._stepped_at = None
        self._drop_uncomputed(account)
        self._derive()

    def _drop_uncomputed(self, account: Account) -> None:
        if account.num_uncomputed:
            self._num_uncomputed -= account.num_uncomputed
            account.num_uncomputed = 0
            self.num_uncomputed_requests -= 1
            self.prefill_progress_at = self._clock()

    def note_stalled(self) -> None:
        """Measure progress from now on, because the node was just ejected for its stall."""
        self.prefill_progress_at = self._clock()

    @property
    def stalled_s(self) -> float:
        """How long the prompts placed by this router have made no progress; 0 without prompts.

        Other routers' prompts do not count, because their progress is unknown here.
        """
        return self._clock() - self.prefill_progress_at if self.num_uncomputed_requests else 0.0

    # ------------------------------------------------------------------ reported and measured

    def note_beat(self, beat: NodeBeat) -> None:
        """Apply a node's report of its own load."""
        if beat.adapters != self.beat.adapters:
            self.adapters = frozenset(beat.adapters)
        self.beat = beat
        self.has_beat = True
        # Tokens that the node must compute beyond this router's count: for other routers' requests,
        # and for prompts with fewer cached tokens than expected.
        self._num_foreign = max(0, beat.num_uncomputed_tokens - self._num_uncomputed)
        self._note_foreign_units()
        self.prefill.refresh()
        self.step.refresh()
        self._derive()

    def _note_foreign_units(self) -> None:
        """Estimate the step units of other routers' requests, each as an average request."""
        beat = self.beat
        num_reported = beat.num_running + beat.num_waiting + beat.num_waiting_for_remote_kvs
        num_held_tokens = (self.num_blocks - beat.num_free_blocks) * self.block_size
        units = REQUEST_UNITS + num_held_tokens / max(num_reported, 1)
        self._num_foreign_requests = max(0, num_reported - self.num_open_requests)
        self._foreign_units = units * self._num_foreign_requests
        self._foreign_running_units = units * max(0, beat.num_running - self._num_decoding)

    def note_prefilled(
        self, receipts: Sequence[PrefillReceipt], accounts: Sequence[Account] = ()
    ) -> None:
        """Measure the prompts that one step finished together; call this before their legs close.

        The time since the last such step is divided evenly among the prompts, and so are their
        tokens: the time of each prompt is unknown, but the sum is the time that the node was busy.
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
        """Note that the tokens of one decode step arrived, and measure the step.

        The step time is fitted to the requests that decode now. Counting those still in transit
        would flatten the line and overload the node.
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
        """Note a request that ended after ``residence_s`` on this decode node.

        Args:
            num_tokens: length of its output; a step may sample several tokens.
            is_cut: whether the token limit ended it. If so, it does not lower the average of long
                outputs, because it might have been long without the limit.
        """
        shared = self.shared
        num_tokens = min(num_tokens, self.max_model_len)
        shared.output_tokens += _FADING * (num_tokens - shared.output_tokens)
        faded = shared.long_output_tokens + _LONG_FADING * (num_tokens - shared.long_output_tokens)
        shared.long_output_tokens = max(num_tokens, shared.long_output_tokens if is_cut else faded)
        shared.residence_s += _FADING * (residence_s - shared.residence_s)

    # ------------------------------------------------------------------ derived

    def slack_s(self, now: float) -> float:
        """Return how long one more prompt may delay steps before a request here is late.

        Prompts that are already queued are included. Takes O(requests here).
        """
        return self.promises.slack_s(now, self.step_base_s) - self.prefill_queue_s

    def _derive(self) -> None:
        """Compute the values that policies read more often than the values change."""
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
        self.num_batch = self.num_open_requests + self._num_foreign_requests
        num_free = (beat.num_free_blocks if self.has_beat else self.num_blocks) * self.block_size
        self.num_free_tokens = num_free - self.num_arriving_tokens
        waits_for_room = beat.num_waiting > beat.num_waiting_for_adapters
        self.num_room_tokens = 0 if waits_for_room else self.num_free_tokens - self.block_size
        num_own_tokens = self.num_arriving_tokens + self._num_decoding_tokens
        own_units = REQUEST_UNITS * self.num_open_requests + num_own_tokens
        self.step_units = own_units + self._foreign_units
        step = self.step
        self.step_base_s = step.base + step.per_unit * self.step_units / weight
        # Slower steps also delay the other requests, which have half of their steps left on
        # average.
        self.step_s_per_unit = step.per_unit * (1 + self.num_batch / 2 / weight)


def _profile(registration: NodeRegistration) -> tuple[Point, ...]:
    """Return the node's measured step times, plus an extrapolated time for a long prompt."""
    times = registration.step_times
    if len(times) < 2:
        return ()
    points = [(float(one.num_tokens), one.seconds) for one in times]
    most, seconds = points[-1]
    return (*points, (_LONG_PROMPT * most, _LONG_PROMPT * seconds))


def _decode_profile(registration: NodeRegistration) -> tuple[Point, ...]:
    """Return the node's decode steps sorted by units; empty if too few for a line."""
    seconds_of = {
        float(REQUEST_UNITS * one.num_requests + one.num_context_tokens): one.seconds
        for one in registration.decode_times
    }
    return tuple(sorted(seconds_of.items())) if len(seconds_of) > 1 else ()
