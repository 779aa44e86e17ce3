"""Judges the system that a quick benchmark measured, and advises what to do."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.quick.measure import Machine, QuickResult, Speed

READING_TOKENS_PER_S = 6.0  # people read about 250 words per minute
FLUENT_TOKENS_PER_S = 20.0
_NEAR, _FAR = 0.6, 0.3  # limits of the share of the memory bandwidth that decoding reaches
_CHEAP_HANDOFF = 0.02  # limit of the hand-off's share of the time to the first token


class Grade(enum.Enum):
    """How well a system serves people who read its answers as they appear."""

    GOOD = "good"
    FAIR = "fair"
    SLOW = "slow"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one measured system.

    Attributes:
        findings: sentences, one per fact that was found.
        advice: what the user can do, in one line each; empty: nothing.
    """

    grade: Grade
    findings: tuple[str, ...]
    advice: tuple[str, ...]


def judge(result: QuickResult) -> Verdict:
    """Judge a measured system by its figures."""
    one, many = result.one, result.many
    failed = [speed for speed in (one, many) if speed.num_failed or not speed.num_requests]
    if failed or one.token_s is None or one.ttft_s is None:
        why = next((speed.error for speed in failed if speed.error), "no answer came in time")
        return Verdict(Grade.FAILED, (f"requests failed: {why}",), ())
    rate = 1 / one.token_s
    findings = [_of_rate(rate), *_of_handoff(one), *_of_many(one, many)]
    share = share_of_memory(result)
    if share is not None:
        findings.append(_of_memory(share))
    grade = Grade.SLOW
    if rate >= READING_TOKENS_PER_S:
        grade = Grade.GOOD if rate >= FLUENT_TOKENS_PER_S else Grade.FAIR
    return Verdict(grade, tuple(findings), tuple(_advice(result, share)))


def share_of_memory(result: QuickResult) -> float | None:
    """Return which share of the memory bandwidth decoding for one reader reaches; None: unknown."""
    if result.machine is None or result.one.read_bytes_per_s is None:
        return None
    return result.one.read_bytes_per_s / result.machine.read_bytes_per_s


def _of_rate(rate: float) -> str:
    times = rate / READING_TOKENS_PER_S
    if times < 1:
        return f"one reader gets {rate:.1f} tokens/s, slower than people read"
    return f"one reader gets {rate:.0f} tokens/s, {times:.1f} times as fast as people read"


def _of_handoff(one: Speed) -> Iterator[str]:
    if one.handoff_s is None or not one.ttft_s:
        return
    share = one.handoff_s / one.ttft_s
    cost = "costs nothing that a reader notices" if share <= _CHEAP_HANDOFF else "is noticeable"
    yield f"the hand-off takes {share:.1%} of the time to the first token, which {cost}"


def _of_many(one: Speed, many: Speed) -> Iterator[str]:
    if many.token_s is None or one.token_s is None:
        return
    gain = many.output_tokens_per_s * one.token_s
    yield f"{many.num_readers} readers together get {gain:.1f} times the tokens of one"


def _of_memory(share: float) -> str:
    if share > 1:
        why = "the CPU's cache holds the model, or other programs slowed the measurement"
        return f"decoding takes {share:.0%} of memory's speed: {why}"
    word = "near the limit" if share >= _NEAR else "some way from the limit"
    if share < _FAR:
        word = "far from the limit"
    return f"decoding takes {share:.0%} of memory's speed: {word}"


def _advice(result: QuickResult, share: float | None) -> Iterator[str]:
    machine = result.machine
    if machine is not None:
        yield from _advice_for(machine, share)
    if not (result.one.kept_up and result.many.kept_up):
        yield "the load generator itself was late: measure again on a less busy machine"


def _advice_for(machine: Machine, share: float | None) -> Iterator[str]:
    if machine.no_kernels:
        yield f"no native kernels ({machine.no_kernels}): {machine.kernels_advice}"
    is_busy = machine.load_average > machine.num_cores / 2
    if is_busy:
        yield (
            f"other programs used the machine (load {machine.load_average:.1f} on "
            f"{machine.num_cores} cores): measure again when they are done"
        )
    if share is None:
        return
    if _NEAR <= share <= 1:
        yield "only fewer bits (--node-args '--weights int4') or faster memory give more tokens/s"
    elif share < _NEAR and not machine.no_kernels and not is_busy:
        yield "more cores may give more tokens/s; `baton doctor` says what this machine lacks"
