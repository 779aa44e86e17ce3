"""Tests of rejection sampling: with and without drafts, tokens have the same distribution.

Where each row has settings of its own, ``BATON_DRAWS`` says how many are drawn, by default some
thousands; `make speculation-long` draws a million there, too, and tells the p values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from baton.api.sampling_params import SamplingParams
from engine.core.step_plan import UNKNOWN_TOKEN, NewRow
from engine.sampling.gumbel import Floats, draw
from engine.sampling.logits import adjust_logits
from engine.sampling.philox import counter_words
from engine.sampling.rejection import (
    DRAFT,
    keep_or_draw,
    probabilities,
    salted,
    sample_with_rejection,
)
from engine.sampling.sampling_input import (
    PARAMETERS,
    RequestSnapshot,
    SamplingInput,
    parameters_row,
)
from tests.property.num_examples import num_draws

pytestmark = pytest.mark.medium

Record = Callable[[str, object], None]
NUM_DRAWS = 1_000_000
CHUNK = 50_000
STEP = 6_000  # requests of a step
VOCAB = 24


def words(num: int, first: int = 0, seed: int = 11) -> np.ndarray:
    return counter_words(np.full(num, seed, np.uint64), first + np.arange(num))


def distribution(spread: float, seed: int) -> Floats:
    weights = np.exp(spread * np.random.default_rng(seed).standard_normal(VOCAB))
    shares: Floats = weights / weights.sum()
    return shares


def p_value(counts: Floats, expected: Floats) -> float:
    """Return the p-value of a chi-square test; assert that no impossible token was drawn."""
    can = expected > 0
    assert not counts[~can].any()
    wanted = expected[can] * counts.sum()
    statistic = float(((counts[can] - wanted) ** 2 / wanted).sum())
    freedom = int(can.sum()) - 1
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1])) if freedom else 1.0


TARGET = distribution(1.5, 1)
NEAR = TARGET * distribution(0.3, 2)
EMPTY_AT_HALF = np.where(np.arange(VOCAB) % 2, TARGET, 0.0)
CASES = {
    "near": (TARGET, NEAR / NEAR.sum()),
    "far": (TARGET, distribution(1.5, 3)),
    "the same: all are kept": (TARGET, TARGET),
    "what cannot be: none is kept": (
        EMPTY_AT_HALF / EMPTY_AT_HALF.sum(), np.where(np.arange(VOCAB) % 2, 0.0, 2.0 / VOCAB)
    ),
    "one draft that is always the same": (TARGET, np.eye(VOCAB)[3]),
    "padding": (np.append(TARGET[:20] / TARGET[:20].sum(), np.zeros(4)), distribution(1.0, 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_million_draws_have_the_target_distribution(case: str, record_property: Record) -> None:
    target, proposed = CASES[case]
    counts, num_kept = np.zeros(VOCAB), 0
    with np.errstate(divide="ignore"):
        scores = torch.from_numpy(np.log(proposed)).expand(CHUNK, -1)
    for first in range(0, NUM_DRAWS, CHUNK):
        keys = words(CHUNK, first)
        drafts = draw(scores, np.ones(CHUNK), salted(keys, DRAFT))
        wanted, offered = (np.broadcast_to(one, (CHUNK, VOCAB)) for one in (target, proposed))
        found = keep_or_draw(wanted, offered, drafts, keys)
        counts += np.bincount(found, minlength=VOCAB)
        num_kept += int((found == drafts).sum())
    check(p_value(counts, target), NUM_DRAWS, record_property)
    expected = np.minimum(target, proposed).sum()  # the most that any coupling keeps
    if case != "one draft that is always the same":
        assert abs(num_kept / NUM_DRAWS - expected) < 0.003


def check(probability: float, num: int, record_property: Record) -> None:
    record_property("draws", num)
    record_property("p", f"{probability:.3f}")
    assert probability > 0.01


def rows_of(params: SamplingParams, num: int) -> np.ndarray:
    new = NewRow(0, "a", params, 5, 1, frozenset(), [])
    return np.array([parameters_row(new)] * num, dtype=PARAMETERS)


def sample(
    params: SamplingParams,
    drafts: Sequence[tuple[int, ...]],
    *,
    known: tuple[int, ...] = (),
    allowed: np.ndarray | None = None,
    proposed: Floats | None = None,
    first: int = 0,
) -> list[tuple[int, ...]]:
    """Outcomes of a step with requests that have these drafts, as many of each.

    Args:
        first: number of the first random word that rows get.
    """
    num, length = len(drafts), len(drafts[0]) + 1
    names = [f"r{index}" for index in range(num)]
    snapshots = {}
    if params.changes_logits or allowed is not None:
        snapshots = {
            index * length + row: RequestSnapshot(params, [0, *known, *own[:row]], 1, frozenset())
            for index, own in enumerate(drafts)
            for row in range(length)
        }
    sampling = SamplingInput(
        tuple(name for name in names for _ in range(length)),
        rows_of(params, num * length),
        words(num * length, first),
        snapshots,
        tuple(t for own in drafts for t in (*own, UNKNOWN_TOKEN)) if length > 1 else (),
    )
    masks = {} if allowed is None else dict.fromkeys(names, [allowed] * length)
    of_rows = None
    if proposed is not None:
        of_rows = {i: proposed for i in range(num * length) if i % length < length - 1}
    logits = LOGITS.expand(num * length, -1).contiguous()
    found = sample_with_rejection(logits, sampling, lambda: masks, of_rows)
    return list(sampling.accept(found).values())


LOGITS = torch.from_numpy(np.log(TARGET)).float()[None]


def test_without_drafts_tokens_are_those_of_the_sampler() -> None:
    [outcome] = sample(SamplingParams(temperature=1.0), [()])
    assert outcome == (int(draw(LOGITS, np.ones(1), words(1))[0]),)


@pytest.mark.parametrize("length", [1, 2])
def test_rows_without_a_draft_and_behind_the_last_one_have_the_target_distribution(
    length: int, record_property: Record
) -> None:
    num, counts = num_draws(20_000), np.zeros(VOCAB)
    params = SamplingParams(temperature=1.0)
    first = 0
    while counts.sum() < num:
        drafts = [tuple([2] * (length - 1))] * CHUNK
        outcomes = sample(params, drafts, first=first, proposed=TARGET if length > 1 else None)
        first += length * CHUNK
        counts += np.bincount([o[-1] for o in outcomes if len(o) == length], minlength=VOCAB)
    check(p_value(counts, TARGET), int(counts.sum()), record_property)


def test_of_greedy_requests_the_most_probable_tokens_are_kept_and_drawn() -> None:
    best = int(TARGET.argmax())
    other = (best + 1) % VOCAB
    params = SamplingParams(temperature=0)
    assert sample(params, [(best, best)]) == [(best, best, best)]
    assert sample(params, [(best, other)]) == [(best, best)]
    assert sample(params, [(other, best)]) == [(best,)]


def mask_of(token_ids: list[int]) -> np.ndarray:
    bits = np.zeros(VOCAB, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little")


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=0.7, top_k=5), None),
        (SamplingParams(temperature=1.3, top_p=0.7), None),
        (SamplingParams(temperature=1.0, min_p=0.1), None),
        (SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.4), None),
        (SamplingParams(temperature=1.0), [1, 4, 9, 16]),
        (SamplingParams(temperature=1.0, logit_bias=((3, 5.0),), banned_token_ids=(1,)), None),
    ],
)
def test_filters_penalties_and_grammars_count_where_drafts_are_kept(
    params: SamplingParams, allowed: list[int] | None, record_property: Record
) -> None:
    mask = None if allowed is None else mask_of(allowed)
    adjusted = LOGITS.double()
    if params.changes_logits or mask is not None:
        snapshot = RequestSnapshot(params, [0, 2, 2], 1, frozenset())
        adjusted = adjust_logits(LOGITS, [snapshot], {} if mask is None else {0: mask})
    expected = probabilities(adjusted, rows_of(params, 1))[0]
    near = NEAR / NEAR.sum()
    draw_drafts, num, counts, num_kept = (
        np.random.default_rng(6),
        num_draws(6000),
        np.zeros(VOCAB),
        0,
    )
    for begin in range(0, num, STEP):
        drafts = draw_drafts.choice(VOCAB, min(STEP, num - begin), p=near)
        outcomes = sample(
            params, [(token_id,) for token_id in drafts.tolist()], known=(2, 2), allowed=mask,
            proposed=near, first=2 * begin,
        )  # fmt: skip
        counts += np.bincount([outcome[0] for outcome in outcomes], minlength=VOCAB)
        num_kept += sum(len(outcome) == 2 for outcome in outcomes)
    check(p_value(counts, expected), num, record_property)
    assert num_kept
