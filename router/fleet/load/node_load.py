"""NodeLoad: what the router knows about one node's load and speed, for policies to read.

    counted     this router's requests that are placed, begin or end on the node
    reported    the node's beats: its load by the requests of all routers
    measured    how long prompts and steps take: one `MeasuredLine` each

Only the `Node` that owns a load changes it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.api.outputs import PrefillReceipt
from baton.link.words import NodeBeat, NodeRegistration, NodeRole
from router.fleet.load.forecast import PlaceForecasts, PrefillForecast
from router.fleet.load.measured_line import MeasuredLine, Point
from router.fleet.load.promises import Promise, Promises
from router.fleet.load.prompt_units import attention_share, profile_points, prompt_units

# (prompt units, seconds) and (step units, seconds) that are assumed for a node without a profile
# until it is measured. The values fit a mid-range GPU with an 8B model.
_DEFAULT_PREFILL = ((0.0, 0.01), (8000.0, 0.81))
_DEFAULT_STEP = ((0.0, 0.01), (100_000.0, 0.02))
# In a decode step, a request costs about as much time, beside its context, as this many tokens of
# context.
REQUEST_UNITS = 500
# Assumed maximum number of a prompt's tokens in one step, if a node does not report its own
DEFAULT_CHUNK_TOKENS = 2048
# A measurement of steps is the mean over this many, because messages of a busy node come in bursts.
STEPS_MEASURED_TOGETHER = 8
# Number of step measurements kept: enough to include several batch sizes, because a single size
# yields no slope.
_STEPS_KEPT = 64
_SHARED_UNITS = (1.0 * REQUEST_UNITS, 8.0 * REQUEST_UNITS, 64.0 * REQUEST_UNITS)
_LONGEST_STEP_S = 1.0
_LEAST_RESIDENCE_S = 0.01
# How many times longer a prompt takes while other requests decode on its node: the first assumed
# factor, the largest factor that counts, and the smallest weight of a new measurement.
_FIRST_BESIDE, _MOST_BESIDE, _BESIDE_FADING = 2.0, 20.0, 0.2
_FADING = 0.05  # weight of a new value in running averages
_LONG_FADING = 0.01


@dataclass(slots=True)
class SharedRates:
    """Times and lengths that the nodes of a router measured together; a new node starts with them.

    Attributes:
        prefill: seconds of a prompt, by its units; see `prompt_units`.
        step: seconds of a decode step, by its units.
        output_tokens: mean output length of a request.
        long_output_tokens: output length that few requests exceed; rises at once, falls slowly.
        residence_s: mean seconds that a request decodes.
        kv_bytes_per_token: bytes of KV per token over all layers; 0: unknown.
        prompt_tokens: mean uncomputed tokens of a prompt.
        prompt_pairs: mean number of pairs of an uncomputed token and an earlier token per prompt.
        forecasts: how well the times of prompts were forecast.
    """

    prefill: MeasuredLine = field(default_factory=lambda: MeasuredLine(default=_DEFAULT_PREFILL))
    step: MeasuredLine = field(
        default_factory=lambda: MeasuredLine(default=_DEFAULT_STEP, num_kept=_STEPS_KEPT)
    )
    output_tokens: float = 200.0
    long_output_tokens: float = 200.0
    residence_s: float = 4.0
    kv_bytes_per_token: float = 0.0
    prompt_tokens: float = 1.0
    prompt_pairs: float = 0.0
    forecasts: PlaceForecasts = field(default_factory=PlaceForecasts)

    def note_prompt(self, num_uncomputed: int, num_cached: int) -> None:
        """Update the mean sizes of prompts."""
        num_pairs = num_uncomputed * (num_cached + 0.5 * num_uncomputed)
        self.prompt_tokens += _FADING * (num_uncomputed - self.prompt_tokens)
        self.prompt_pairs += _FADING * (num_pairs - self.prompt_pairs)


@dataclass(slots=True, eq=False)
class Account:
    """The load of one open request on one node; only the node's `NodeLoad` writes here.

    Attributes:
        num_tokens: the request's part of the node's ``num_open_tokens``.
        num_uncomputed: number of prompt tokens that this node must still compute.
        num_units: units of these tokens, rounded, so that sums over accounts are exact.
        num_arriving: number of prompt tokens whose KV needs room here and has not arrived.
        num_decoding: number of prompt tokens once the request decodes here; 0 before.
        is_beside: whether other requests were on this decode node when this request was placed.
        fetch_s: seconds that the request is expected to wait for a cached prefix after its queue.
        is_pooled: whether the request is pooled, so that it lets other prompts go first.
        begun_at: when this decode node sent its first token of the request; None before.
        promise: the request's deadline, if it decodes here.
        forecast: expected times of the prompt; None if another node computes the prompt.
        unmeasured: units and seconds of a prompt that this decode node computed, as the router
            measured them; kept until the node reports its own time. None: nothing to measure.
    """

    num_tokens: int
    num_uncomputed: int = 0
    num_units: int = 0
    num_arriving: int = 0
    num_decoding: int = 0
    is_beside: bool = False
    fetch_s: float = 0.0
    is_pooled: bool = False
    begun_at: float | None = None
    promise: Promise | None = None
    forecast: PrefillForecast | None = None
    unmeasured: tuple[int, float] | None = None


class NodeLoad:
    """Tracks one node's load. Policies and the gate only read the load.

    Args:
        shared: measurements of all nodes of this router.
        clock: returns monotonic seconds.

    Attributes:
        weight: share of a healthy node's load that this node should get, above 0 up to 1; low
            during warm-up.
        num_blocks: size of the node's KV cache in blocks.
        max_model_len: longest request that the node accepts, in tokens.
        chunk_tokens: maximum number of a prompt's tokens that the node computes in one step.
        loads_adapters: whether the node can load adapters from files.
        encodes_images: whether the node can compute prompts with images.
        adapters: digests of the adapters in the node's memory.
        beat: the node's latest report of its load from all routers.
        num_open_requests: number of requests that this router placed on the node and that have not
            ended.
        num_open_tokens: tokens of the open requests. On a prefill node: prompt tokens that are not
            computed yet; on a decode node: prompt tokens plus the largest possible outputs.
        num_uncomputed_requests: number of open requests whose prompt the node must still compute.
        num_placed_tokens: tokens of all requests that this router ever placed on the node, counted
            like ``num_open_tokens``.
        attention_share: seconds of attention from one prompt token to one earlier token, divided
            by the seconds of a token without attention.
        prefill: predicted seconds to compute a prompt, by the units of its uncomputed tokens.
        awaits_encodings: whether all open prompts wait for encodings from encode nodes, so that
            the node has nothing to compute.
        awaits_data: whether all open prompts wait for encodings, for the node to decode their
            image files, or for cached KV, so that no step can finish a prompt.
        prefill_queue_s: predicted seconds to compute all open prompts of all routers that do not
            wait for encodings.
        sampling_queue_s: the part of ``prefill_queue_s`` that does not belong to this router's
            pooled prompts. Other prompts go before pooled ones, and so wait only for this part.
        prefill_base_s, prefill_s_per_unit: predicted seconds until one more prompt is computed,
            with the queue: base + per unit * units. Larger if the weight is below 1.
        prefill_front_s: mean seconds per prompt in ``prefill_queue_s``: the assumed whole time of
            the first prompt, of which a part may be done. Larger if the weight is below 1.
        prefill_progress_at: when the node last finished a prompt, or when it got its first prompt
            after being idle, by the clock.
        prefill_asked_at: when the last prompt was placed on the node, or when the node joined.
        beside_factor: how many times longer a prompt takes while other requests decode on the node;
            above 1, because the prompt's chunks are small and share their steps with decodes.
        step: predicted seconds of a decode step, by `step_units`.
        step_units: size of the next step: its context tokens, plus `REQUEST_UNITS` per request.
        step_base_s, step_s_per_unit: cost in seconds per step of one more request: base + per unit
            * the request's units. Counts the step itself and the delay of all other requests.
        num_batch: number of requests on the node, or on their way to it, from all routers.
        num_free_tokens: number of tokens whose KV finds room once the KV of all placed requests has
            arrived; may be negative.
        num_room_tokens: tokens of the longest prompt whose KV finds room without waiting.
        num_waiting_for_room: number of requests that wait for blocks or for a place in the batch,
            as the node last reported; prompts that the node computes itself are left out.
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
        self.chunk_tokens = registration.num_chunk_tokens or DEFAULT_CHUNK_TOKENS
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
        self.attention_share = share = attention_share(registration)
        points = profile_points(registration, share)
        self.prefill = MeasuredLine(points, shared=self.shared.prefill)
        self.step = MeasuredLine(
            _decode_profile(registration),
            shared=self.shared.step,
            num_kept=_STEPS_KEPT,
            shared_units=_SHARED_UNITS,
        )
        self.beside_factor, self._num_beside = _FIRST_BESIDE, 0
        self.awaits_encodings = self.awaits_data = False
        self.prefill_queue_s = self.sampling_queue_s = 0.0
        self.prefill_base_s = self.prefill_s_per_unit = self.prefill_front_s = 0.0
        self.prefill_progress_at = self.prefill_asked_at = clock()
        self.num_batch = 0
        self.step_units = 0.0
        self.step_base_s = self.step_s_per_unit = 0.0
        self.num_free_tokens = self.num_room_tokens = self.num_blocks * self.block_size
        self.num_waiting_for_room = 0
        self._is_decode = registration.role is NodeRole.DECODE
        self._clock = clock
        # Seconds of recent prompts on this decode node, which fade with time, and when they were
        # last faded
        self._prompts_s, self._prompts_at = 0.0, self.prefill_asked_at
        self.has_beat = False
        # Number of prompt tokens of this router's requests that are not computed, and their units
        self._num_uncomputed = self._num_units = 0
        self.num_uncomputed_requests = 0
        # The pooled part of the units and requests
        self._num_pooled_units = self._num_pooled_requests = 0
        self._num_foreign = 0
        self._num_foreign_requests = 0
        self._num_decoding = 0
        self._num_decoding_tokens = 0  # prompt tokens of the decoding requests
        self._foreign_units = self._foreign_running_units = 0.0
        self._stepped_at: float | None = None
        # Steps timed since the last measurement, and the sums of their units and seconds
        self._num_timed = 0
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
        num_cached: int = 0,
        num_arriving: int = 0,
        promise: Promise | None = None,
        fetch_s: float = 0.0,
        is_pooled: bool = False,
    ) -> Account:
        """Add a request that was placed here to the load; return the request's `Account`.

        Args:
            num_cached: number of cached prompt tokens before the uncomputed ones.
        """
        forecast, num_units, is_beside = None, 0, self.num_batch > 0
        if num_uncomputed:
            num_units = round(prompt_units(self.attention_share, num_uncomputed, num_cached))
            self.shared.note_prompt(num_uncomputed, num_cached)
            self.prefill_asked_at = now = self._clock()
            if not self.num_uncomputed_requests:
                self.prefill_progress_at = now
            factor = self.beside_factor if is_beside else 1.0
            forecast = self._forecast(num_uncomputed, num_units, now, factor)
            forecast.wait_s += fetch_s
            self._num_uncomputed += num_uncomputed
            self._num_units += num_units
            self.num_uncomputed_requests += 1
            if is_pooled:
                self._num_pooled_units += num_units
                self._num_pooled_requests += 1
            if self._is_decode:
                self._prompts_s = self._recent_prompts_s(now) + self.delay_s(num_units)
                self._prompts_at = now
        self.num_open_requests += 1
        self.num_open_tokens += num_tokens
        self.num_placed_tokens += num_tokens
        self.num_arriving_tokens += num_arriving
        self._derive()
        return Account(
            num_tokens,
            num_uncomputed,
            num_units,
            num_arriving,
            is_beside=is_beside,
            fetch_s=fetch_s,
            is_pooled=is_pooled,
            promise=promise,
            forecast=forecast,
        )

    def _forecast(
        self, num_tokens: int, num_units: int, now: float, factor: float
    ) -> PrefillForecast:
        """Forecast a prompt whose computation takes ``factor`` times as long as on an idle node."""
        begun_s = min(now - self.prefill_progress_at, factor * self.prefill_front_s)
        wait_s = max(factor * self.prefill_queue_s - begun_s, 0.0)
        return PrefillForecast(num_tokens, wait_s, factor * self.prefill.seconds(num_units), now)

    def _note_forecast(self, account: Account, now: float, compute_s: float) -> None:
        forecast, account.forecast = account.forecast, None
        if forecast is not None:
            forecast.measured_compute_s = compute_s
            forecast.measured_wait_s = max(now - forecast.placed_at - compute_s, 0.0)
            forecasts = self.shared.forecasts
            (forecasts.alone if self._is_decode else forecasts.pair).note(forecast)

    def note_computed(self, account: Account) -> None:
        """Remove the prompt of an open request from the load, because the prompt is computed."""
        self.num_open_tokens -= account.num_tokens
        account.num_tokens = 0
        self._drop_uncomputed(account)
        self._derive()

    def note_begun(self, account: Account) -> None:
        """Count a request as decoding, because its KV is here and the node sent its first token."""
        account.begun_at = self._clock()
        if account.num_uncomputed:
            busy_s = max(account.begun_at - self.prefill_progress_at - account.fetch_s, 0.0)
            self._note_forecast(account, account.begun_at, busy_s)
            if account.is_beside:
                self._note_beside(busy_s / self.prefill.seconds(account.num_units))
            else:
                account.unmeasured = account.num_units, busy_s
        if account.promise is not None:
            self.promises.begin_promise(account.promise)
        account.num_decoding, account.num_arriving = account.num_arriving, 0
        self._num_decoding += 1
        self._num_decoding_tokens += account.num_decoding
        self.num_arriving_tokens -= account.num_decoding
        self._drop_uncomputed(account)
        self._derive()

    def note_prompt_time(self, account: Account, own_s: float = math.inf) -> None:
        """Measure a prompt that this decode node computed itself; do nothing if it computed none.

        The shorter of the node's and the router's time counts. The router's time includes the
        network: for a prompt with few uncomputed tokens that is most of the time, and would make
        long prompts look slower.

        Args:
            own_s: seconds until the first token, measured by the node; inf: not reported.
        """
        if account.unmeasured is not None:
            num_units, seconds = account.unmeasured
            account.unmeasured = None
            self.prefill.measure(num_units, min(seconds, own_s))
            self.prefill.refresh()

    def _note_beside(self, factor: float) -> None:
        """Measure how many times longer a prompt took because other requests decoded here."""
        self._num_beside += 1
        part = max(1 / (1 + self._num_beside), _BESIDE_FADING)
        self.beside_factor += part * (min(max(factor, 1.0), _MOST_BESIDE) - self.beside_factor)

    def note_closed(self, account: Account) -> None:
        """Remove an ended request from the load."""
        self.note_prompt_time(account)
        self.num_open_requests -= 1
        self.num_open_tokens -= account.num_tokens
        self.num_arriving_tokens -= account.num_arriving
        self._num_decoding -= account.begun_at is not None
        self._num_decoding_tokens -= account.num_decoding
        if account.promise is not None:
            self.promises.close(account.promise)
        if not self._num_decoding:
            # The node is idle, so the time until its next token is not the time of a step.
            self._stepped_at = None
        self._drop_uncomputed(account)
        self._derive()

    def _drop_uncomputed(self, account: Account) -> None:
        if account.num_uncomputed:
            self._num_uncomputed -= account.num_uncomputed
            self._num_units -= account.num_units
            if account.is_pooled:
                self._num_pooled_units -= account.num_units
                self._num_pooled_requests -= 1
            account.num_uncomputed = account.num_units = 0
            self.num_uncomputed_requests -= 1
            self.prefill_progress_at = self._clock()

    def note_stalled(self) -> None:
        """Count the time without progress from now on: the node was ejected or loads files."""
        self.prefill_progress_at = self._clock()

    @property
    def stalled_s(self) -> float:
        """Seconds since the node last finished a prompt of this router; 0 without open prompts.

        Prompts of other routers are left out, because their progress is unknown here.
        """
        return self._clock() - self.prefill_progress_at if self.num_uncomputed_requests else 0.0

    # ------------------------------------------------------------------ reported and measured

    def note_beat(self, beat: NodeBeat) -> None:
        """Update the load by a beat, the node's own report of its load."""
        if beat.adapters != self.beat.adapters:
            self.adapters = frozenset(beat.adapters)
        self.beat = beat
        self.has_beat = True
        # Tokens that the node reports beyond this router's count: from other routers' requests, or
        # from prompts with fewer cached tokens than expected.
        self._num_foreign = max(0, beat.num_uncomputed_tokens - self._num_uncomputed)
        self._note_foreign_units()
        # A prompt that this node computes itself may wait for the prompts before it. Such a wait is
        # part of `prefill_queue_s`, and is no sign that room is short.
        num_prompts = self.num_uncomputed_requests + bool(self._num_foreign)
        num_waiting = beat.num_waiting - beat.num_waiting_for_adapters
        self.num_waiting_for_room = max(num_waiting - num_prompts, 0)
        self.prefill.refresh()
        self.step.refresh()
        self._derive()

    def _note_foreign_units(self) -> None:
        """Estimate the step units of other routers' requests; each counts as an average request."""
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

        The times of the single prompts are unknown. So the time since the last step that finished
        prompts is divided evenly among the prompts, and so are their units.
        """
        computed = [receipt for receipt in receipts if receipt.num_computed_tokens > 0]
        now = self._clock()
        busy_s = now - self.prefill_progress_at
        busy_s = max(min(busy_s, max((r.prefill_s for r in computed), default=0.0)), 0.0)
        most = self.max_model_len
        units = sum(
            self.prompt_units(min(one.num_computed_tokens, most), min(one.num_cached_tokens, most))
            for one in computed
        )
        for _ in computed:
            self.prefill.measure(units / len(computed), busy_s / len(computed))
        for account in accounts:
            self._note_forecast(account, now, busy_s / max(len(computed), 1))
        self.prefill.refresh()
        self.prefill_progress_at = now

    def note_step(self) -> None:
        """Note that the tokens of one decode step arrived, and measure the step's time.

        The step counts only requests that decode now. Counting requests whose KV has not arrived
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
        """Update the mean output lengths and times by a request that ended on this decode node.

        Args:
            num_tokens: number of output tokens.
            residence_s: seconds that the request decoded here.
            is_cut: whether the token limit ended the output. Such an output does not lower the
                length of long outputs, because it might have been long without the limit.
        """
        shared = self.shared
        num_tokens = min(num_tokens, self.max_model_len)
        shared.output_tokens += _FADING * (num_tokens - shared.output_tokens)
        faded = shared.long_output_tokens + _LONG_FADING * (num_tokens - shared.long_output_tokens)
        shared.long_output_tokens = max(num_tokens, shared.long_output_tokens if is_cut else faded)
        shared.residence_s += _FADING * (residence_s - shared.residence_s)

    # ------------------------------------------------------------------ derived

    def slack_s(self, now: float) -> float:
        """Return for how many seconds one more prompt may delay steps until some request is late.

        The time to compute the prompts that are already queued is subtracted. Takes time
        proportional to the requests on the node.
        """
        return self.promises.slack_s(now, self.step_base_s) - self.prefill_queue_s

    def prompt_units(self, num_uncomputed: int, num_cached: int) -> float:
        """Return the units of a prompt's uncomputed tokens behind its cached ones, on this node."""
        return prompt_units(self.attention_share, num_uncomputed, num_cached)

    @property
    def units_per_token(self) -> float:
        """Mean units on this node per uncomputed token of the router's latest prompts; first 1."""
        return 1.0 + self.attention_share * self.shared.prompt_pairs / self.shared.prompt_tokens

    def prompt_s(self, num_uncomputed: int, num_cached: int) -> float:
        """Return the predicted seconds to compute a prompt's tokens behind its cached ones."""
        return self.prefill.seconds(self.prompt_units(num_uncomputed, num_cached))

    def arrives_s(self, num_uncomputed: int, num_cached: int) -> float:
        """Return the predicted seconds until one more prompt is computed, with the queue."""
        units = self.prompt_units(num_uncomputed, num_cached)
        return self.prefill_base_s + self.prefill_s_per_unit * units

    def delay_s(self, units: float) -> float:
        """Return the seconds by which a prompt of this size delays the decodes on this node.

        The fixed time of a prompt is left out: a decode step has a fixed time with and without
        prompt tokens.
        """
        return self.prefill.per_unit * units / self._weight

    def prompt_share(self, now: float, more_s: float) -> float:
        """Return the share of an average answer's time that goes to prompts here, from 0 to 1.

        Args:
            more_s: seconds of a further prompt.
        """
        residence_s = max(self.shared.residence_s, _LEAST_RESIDENCE_S)
        return min((self._recent_prompts_s(now) + more_s) / residence_s, 1.0)

    def _recent_prompts_s(self, now: float) -> float:
        """Return the seconds of recent prompts; older prompts have less weight."""
        if not self._prompts_s:
            return 0.0
        residence_s = max(self.shared.residence_s, _LEAST_RESIDENCE_S)
        return self._prompts_s * math.exp(-max(now - self._prompts_at, 0.0) / residence_s)

    def _derive(self) -> None:
        """Compute the values for policies, because they are read more often than they change."""
        beat = self.beat
        line, weight, num_requests = self.prefill, self._weight, self.num_uncomputed_requests
        # Beats report tokens. The router does not know how long other routers' prompts are.
        foreign_units = self._num_foreign * self.units_per_token
        open_s = line.base * num_requests + line.per_unit * (self._num_units + foreign_units)
        self.prefill_queue_s = open_s * (1 - self._share_without_encodings())
        pooled_s = line.base * self._num_pooled_requests + line.per_unit * self._num_pooled_units
        self.sampling_queue_s = max(self.prefill_queue_s - pooled_s, 0.0)
        self.prefill_base_s = (self.prefill_queue_s + line.base) / weight
        self.prefill_s_per_unit = line.per_unit / weight
        front_s = min(open_s / max(num_requests, 1), self.prefill_queue_s)
        self.prefill_front_s = front_s / weight
        if not self._is_decode:
            return
        self.num_batch = self.num_open_requests + self._num_foreign_requests
        num_free = (beat.num_free_blocks if self.has_beat else self.num_blocks) * self.block_size
        self.num_free_tokens = num_free - self.num_arriving_tokens
        num_room_tokens = self.num_free_tokens - self.block_size
        self.num_room_tokens = 0 if self.num_waiting_for_room else num_room_tokens
        num_own_tokens = self.num_arriving_tokens + self._num_decoding_tokens
        own_units = REQUEST_UNITS * self.num_open_requests + num_own_tokens
        self.step_units = own_units + self._foreign_units
        step = self.step
        self.step_base_s = step.base + step.per_unit * self.step_units / weight
        # A slower step also delays the other requests, which have half of their steps left on
        # average.
        self.step_s_per_unit = step.per_unit * (1 + self.num_batch / 2 / weight)

    def _share_without_encodings(self) -> float:
        """Return which share of the open prompts waits for encodings; set `awaits_encodings`.

        Set `awaits_data`, too. The node does not say which prompts wait, so each prompt counts as
        an average prompt. Prompts whose files the node decodes count fully, because other prompts
        with images wait for them.
        """
        beat = self.beat
        num_without_images = beat.num_waiting_for_encodings + beat.num_decoding_images
        num_without_data = num_without_images + beat.num_waiting_for_prefixes
        if not num_without_data:  # by far the most frequent case
            self.awaits_encodings = self.awaits_data = False
            return 0.0
        num_prompts = max(self.num_uncomputed_requests, beat.num_waiting + beat.num_running)
        self.awaits_encodings = beat.num_waiting_for_encodings >= max(num_prompts, 1)
        self.awaits_data = num_without_data >= num_prompts
        return min(beat.num_waiting_for_encodings / max(num_prompts, 1), 1.0)


def _decode_profile(registration: NodeRegistration) -> tuple[Point, ...]:
    """Return the decode times of a node's profile by step units; empty if too few for a line."""
    seconds_of = {
        float(REQUEST_UNITS * one.num_requests + one.num_context_tokens): one.seconds
        for one in registration.decode_times
    }
    return tuple(sorted(seconds_of.items())) if len(seconds_of) > 1 else ()
