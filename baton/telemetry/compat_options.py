"""Whose names metrics are shown by, besides our own."""

from __future__ import annotations

COMPAT_NAMES = ("none", "vllm")
COMPAT_HELP = (
    "Show metrics by another engine's names, too, for dashboards and gateways that expect them: "
    "vllm."
)
