"""Prompt units: count how much work a prompt is, in tokens that attend to no earlier token.

    units of n tokens behind c cached ones    n + share * n * (c + n / 2)

The share is a node's time of attention from one token to one earlier token, divided by the node's
time of a token without attention. A node measures a step with and without a context at its start,
from which the share follows. So a `MeasuredLine` over units predicts short and long prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.link.words import NodeRegistration, StepTime
from router.fleet.load.measured_line import Point

# Bounds against measurements that were disturbed. A share of 0.1 means that attention to ten tokens
# takes as long as everything else that a token needs.
MAX_SHARE = 0.1
# Attention takes at most this part of the time by which the largest step is longer than the
# smallest step, both without a context.
_MOST_IN_STEP = 0.9
# A profile gets one more point, for a prompt this many times as long as its largest step
_LONG_PROMPT = 4


def units_until(share: float, num_tokens: float) -> float:
    """Return the units of a prompt's first tokens.

    The units of tokens behind cached ones are the difference of two such numbers.
    """
    return num_tokens * (1.0 + 0.5 * share * num_tokens)


def tokens_until(share: float, units: float) -> float:
    """Return how many first tokens of a prompt have these units: the inverse of `units_until`."""
    return 2.0 * units / (1.0 + math.sqrt(1.0 + 2.0 * share * units))


def prompt_units(share: float, num_uncomputed: float, num_cached: float) -> float:
    """Return the units of a prompt's last tokens behind its cached first tokens."""
    return num_uncomputed * (1.0 + share * (num_cached + 0.5 * num_uncomputed))


def attention_share(registration: NodeRegistration) -> float:
    """Return a node's share from its profile; 0 if the node measured no step behind a context."""
    step_times = registration.step_times
    if len(step_times) < 2:
        return 0.0
    least, most = step_times[0], step_times[-1]
    pair_s = _seconds_per_pair(step_times, registration.context_step_times)
    # Seconds and pairs by which the largest step exceeds the smallest one
    more_s = most.seconds - least.seconds
    more_pairs = (most.num_tokens**2 - least.num_tokens**2) / 2
    attention_s = min(pair_s * more_pairs, _MOST_IN_STEP * more_s)
    if not attention_s > 0:
        return 0.0
    token_s = (more_s - attention_s) / (most.num_tokens - least.num_tokens)
    if not token_s > 0:  # times near the smallest number of a float are rounded
        return 0.0
    return min(attention_s / more_pairs / token_s, MAX_SHARE)


def _seconds_per_pair(step_times: Sequence[StepTime], context_times: Sequence[StepTime]) -> float:
    """Return the seconds of attention from one token to one earlier token; 0: not measured.

    Compares a step behind a context with the step of equally many tokens without a context. The
    result is negative if the step behind a context was faster.
    """
    alone_s = {one.num_tokens: one.seconds for one in step_times}
    found = [
        (one.seconds - alone_s[one.num_tokens]) / one.num_tokens / one.num_context_tokens
        for one in context_times
        if one.num_tokens in alone_s and one.num_context_tokens
    ]
    return found[-1] if found else 0.0


def profile_points(registration: NodeRegistration, share: float) -> tuple[Point, ...]:
    """Return the (units, seconds) of a node's profile, and an extrapolated point of a long prompt.

    The long prompt is computed in several steps as large as the profile's largest. Each of these
    steps takes the time of that step, and the time of attention to the steps before.
    """
    times = registration.step_times
    if len(times) < 2:
        return ()
    points = [(units_until(share, one.num_tokens), one.seconds) for one in times]
    (_, least_s), (units, seconds) = points[0], points[-1]
    long_units = units_until(share, _LONG_PROMPT * times[-1].num_tokens)
    unit_s = max(seconds - least_s, 0.0) / (units - points[0][0])
    long_s = _LONG_PROMPT * seconds + (long_units - _LONG_PROMPT * units) * unit_s
    return (*points, (long_units, long_s))
