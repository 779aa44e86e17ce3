"""Fleets of any size for tests of routing policies, as `baton.testing` has them."""

from __future__ import annotations

from baton.testing.policies import FleetBook, names

__all__ = ["FleetBook", "names"]
