"""Divides a product of parameters into the cases of `make test` and of `make test-thorough`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Return every combination of the axes' values for ``parametrize``.

    Few stay in `make test`: every two values of two axes are together in one of them. The others
    are marked ``thorough``. Which ones depends on the axes' lengths alone.
    """
    values = [list(axis) for axis in axes]
    cases = list(product(*(range(len(axis)) for axis in values)))
    missing = {case: _pairs(case) for case in cases}
    kept = set[tuple[int, ...]]()
    while (best := max(cases, key=lambda case: len(missing[case]))) and missing[best]:
        kept.add(best)
        covered = set(missing[best])
        for pairs in missing.values():
            pairs -= covered
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, case, strict=True)),
            marks=() if case in kept else pytest.mark.thorough,
        )
        for case in cases
    ]


def _pairs(case: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    """Two places of a combination, each with its axis."""
    return set(combinations(enumerate(case), 2))
