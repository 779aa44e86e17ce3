"""How many examples a property is tried on: few in `make test`, many in `make property-long`."""

from __future__ import annotations

import os


def num_examples(usual: int) -> int:
    """``usual``, unless the environment variable BATON_EXAMPLES says how many."""
    return int(os.environ.get("BATON_EXAMPLES") or usual)
