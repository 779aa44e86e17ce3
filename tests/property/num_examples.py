"""The number of examples that a test draws: few in `make test`, many in the `-long` targets."""

from __future__ import annotations

import os


def num_examples(usual: int) -> int:
    """``usual``, unless the environment variable BATON_EXAMPLES says how many."""
    return int(os.environ.get("BATON_EXAMPLES") or usual)


def num_requests(usual: int) -> int:
    """``usual``, unless the environment variable BATON_REQUESTS says how many."""
    return int(os.environ.get("BATON_REQUESTS") or usual)


def num_draws(usual: int) -> int:
    """``usual``, unless the environment variable BATON_DRAWS says how many."""
    return int(os.environ.get("BATON_DRAWS") or usual)
