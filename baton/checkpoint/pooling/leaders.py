"""Leaders: which prompts of a request to compute before the others, which share their beginning.

Prompts that start in one step each compute the beginning that they share, as no block is cached
yet. When one of them has ended, the others find the beginning's blocks in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SHARED_TOKENS = 64  # a shorter beginning is not worth another round


def find_leaders(
    prompts: Sequence[Sequence[int]], least: int = MIN_SHARED_TOKENS
) -> tuple[list[int], list[int]]:
    """Return the places of the prompts to compute first, and of all others.

    Neighbours that share a beginning have one leader, the first of them; a prompt that shares
    nothing belongs to the others.

    Args:
        least: tokens that a shared beginning has at least.
    """
    leaders: list[int] = []
    others: list[int] = []
    leads = True  # whether the next prompt may lead
    for place, prompt in enumerate(prompts):
        following = prompts[place + 1] if place + 1 < len(prompts) else ()
        is_shared = len(following) >= least and prompt[:least] == following[:least]
        (leaders if leads and is_shared else others).append(place)
        leads = not is_shared
    return leaders, others
