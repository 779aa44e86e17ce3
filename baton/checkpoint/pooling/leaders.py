"""Leaders: prompts of a request that are computed first, so that others reuse their beginnings.

Prompts that start in the same step would each compute their shared beginning, because its blocks
are not cached yet. Once a leader has ended, the others find the blocks in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SHARED_TOKENS = 64  # a shorter shared beginning is not worth another round


def find_leaders(
    prompts: Sequence[Sequence[int]], least: int = MIN_SHARED_TOKENS
) -> tuple[list[int], list[int]]:
    """Return the indexes of the prompts to compute first, and of all others.

    Among neighbouring prompts with a shared beginning, the first leads. A prompt without a shared
    beginning is returned among the others.

    Args:
        least: fewest tokens of a shared beginning.
    """
    leaders: list[int] = []
    others: list[int] = []
    leads = True  # whether the next prompt may be a leader
    for place, prompt in enumerate(prompts):
        following = prompts[place + 1] if place + 1 < len(prompts) else ()
        is_shared = len(following) >= least and prompt[:least] == following[:least]
        (leaders if leads and is_shared else others).append(place)
        leads = not is_shared
    return leaders, others
