"""Settings for all tests. Set before torch is imported anywhere."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Tests are many small computations: more threads only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a shared machine stops a test now and then. The gate runs the same examples each
# time; at a desk each run tries new ones.
settings.register_profile(
    "baton",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("baton")
