"""Leaders: prompts of a request that are computed first, so that later prompts reuse their KV.

If prompts with a shared beginning start in the same step, each computes this beginning, because its
blocks are not cached yet. If one of the prompts (the leader) is computed first, the others find the
blocks in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SHARED_TOKENS = 64  # with fewer tokens, waiting for a leader costs more time than it saves


def find_leaders(
    prompts: Sequence[Sequence[int]], least: int = MIN_SHARED_TOKENS
) -> tuple[list[int], list[int]]:
    """Return the indexes of the leaders, which are computed first, and of all other prompts.

    The first of consecutive prompts with a shared beginning is their leader. A prompt without a
    shared beginning is no leader.

    Args:
        least: smallest number of tokens that a shared beginning must have.
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
