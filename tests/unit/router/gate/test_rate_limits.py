"""Unit tests of rate limits: allowed calls, the time until more are allowed, and refunds."""

from __future__ import annotations

import pytest

from baton.access.identity import ANYBODY, Limits, Principal
from baton.api.errors import OverloadedError
from router.gate.rate_limits import REQUESTS, TOKENS, RateLimits
from tests.fakes.time.virtual_clock import VirtualClock


def key(name: str = "a", /, **limits: float) -> Principal:
    return Principal(name=name, tenant=name, limits=Limits(**limits))  # type: ignore[arg-type]


def delay_of(rates: RateLimits, principal: Principal, num_tokens: int = 1) -> float:
    """Until a request would begin; 0: at once."""
    try:
        rates.check(principal, num_tokens)
    except OverloadedError as error:
        return error.retry_delay_s or 0.0
    return 0.0


def test_a_minutes_worth_may_come_at_once_and_then_one_after_the_other() -> None:
    clock = VirtualClock()
    rates, alice = RateLimits(clock), key(requests_per_minute=30)
    for _ in range(30):
        assert delay_of(rates, alice) == 0
        rates.charge_limits(alice, 1)
    with pytest.raises(OverloadedError, match="this API key has used its 30 requests per minute"):
        rates.check(alice)
    assert delay_of(rates, key("b", requests_per_minute=30)) == 0


def test_hints_of_callers_without_limits_are_limited() -> None:
    clock = VirtualClock()
    rates = RateLimits(clock)
    for _ in range(3):
        rates.charge_hint(ANYBODY, 3)
    with pytest.raises(OverloadedError, match="max-hints-per-minute: 3 hints") as caught:
        rates.charge_hint(ANYBODY, 3)
    assert caught.value.retry_delay_s == 20
    rates.charge_hint(key("b"), 3)
    clock.advance(20)
    rates.charge_hint(ANYBODY, 3)
    assert delay_of(rates, ANYBODY) == 0


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({"requests_per_minute": 7}, 1),
        ({"tokens_per_minute": 1000}, 170),
        ({"tokens_per_minute": 1000}, 4000),  # more than a bucket holds: when it is full
        ({"requests_per_minute": 0.5}, 1),
        ({"requests_per_minute": 7, "tokens_per_minute": 100}, 90),
    ],
)
def test_when_it_says_that_there_is_room_there_is_and_not_before(
    limits: dict[str, float], num_tokens: int
) -> None:
    clock = VirtualClock()
    rates, alice = RateLimits(clock), key(**limits)
    refused = 0
    for _ in range(20):
        while delay_s := delay_of(rates, alice, num_tokens):
            refused += 1
            clock.advance(delay_s - 1e-3)
            assert delay_of(rates, alice, num_tokens) > 0
            clock.advance(1e-3 + 1e-6)
        rates.charge_limits(alice, num_tokens)
    assert refused


def test_what_a_request_did_not_need_is_given_back_and_what_it_took_more_is_owed() -> None:
    clock = VirtualClock()
    rates, alice = RateLimits(clock), key(tokens_per_minute=600, requests_per_minute=10)

    def remaining() -> list[float]:
        return [rates.state(alice)[kind].remaining for kind in (REQUESTS, TOKENS)]

    rates.charge_limits(alice, 100)
    rates.give_back(alice, 40, begun=True)
    assert remaining() == [9, 540]
    rates.charge_limits(alice, 100)
    rates.give_back(alice, 100, begun=False)  # it never began
    assert remaining() == [9, 540]
    rates.give_back(alice, -1140, begun=True)
    assert remaining() == [9, 0]
    assert delay_of(rates, alice) == pytest.approx((600 + 1) / 10)
    assert rates.state(alice)[TOKENS].reset_s == pytest.approx(120)


def test_nothing_is_saved_up_beyond_a_minutes_worth() -> None:
    clock = VirtualClock()
    rates, alice = RateLimits(clock), key(tokens_per_minute=600)
    rates.charge_limits(alice, 10)
    clock.advance(10_000)
    rates.give_back(alice, 500, begun=True)
    assert rates.state(alice)[TOKENS].remaining == 600


def test_who_has_no_limits_has_none() -> None:
    rates = RateLimits()
    for principal in (ANYBODY, key()):
        rates.charge_limits(principal, 10**9)
        rates.check(principal, 10**9)
        assert rates.state(principal) == {}


def test_a_limit_that_is_changed_counts_at_once() -> None:
    clock = VirtualClock()
    rates = RateLimits(clock)
    for _ in range(2):
        rates.charge_limits(key(requests_per_minute=2), 1)
    assert delay_of(rates, key(requests_per_minute=2)) == pytest.approx(30)
    assert delay_of(rates, key(requests_per_minute=120)) == pytest.approx(0.5)
    assert rates.state(key(requests_per_minute=2))[REQUESTS].limit == 2
