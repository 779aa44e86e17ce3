"""Settings for all tests. Set before torch is imported anywhere."""

from __future__ import annotations

import os

# Tests are many small computations: more threads only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
