"""Four users of a split deployment: prompts do not stretch the gaps of each other's streams.

The real router and real node loops, on the virtual time of a CPU with two cores.
"""

from __future__ import annotations

import statistics

import pytest

from tests.fakes.router.beside_decodes import percentile, play

pytestmark = pytest.mark.medium


@pytest.mark.parametrize(("num_users", "stretch"), [(4, 1.5), (16, 3.0)])
def test_prompts_hardly_stretch_the_gaps_of_streams(num_users: int, stretch: float) -> None:
    seen = play("split", num_users, 64)
    assert percentile(seen.later_gaps_s, 0.99) <= stretch * statistics.median(seen.later_gaps_s)
    # Behind token 1 there are the hand-off, a step with 64 prompt tokens that has begun, and a step
    # of its own.
    assert max(seen.gaps_s) <= (stretch + 3) * statistics.median(seen.gaps_s)


def test_prompts_are_still_computed_beside_decodes_where_prefill_nodes_are_busy() -> None:
    both, pairs_only = (play(shape, 16, 64) for shape in ("split", "split, no local prefill"))
    assert both.num_alone > 0
    assert both.elapsed_s < 0.9 * pairs_only.elapsed_s
