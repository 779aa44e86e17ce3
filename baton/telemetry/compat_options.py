"""Options to export metrics under the names of other engines, too."""

from __future__ import annotations

COMPAT_NAMES = ("none", "vllm")
COMPAT_HELP = (
    "Show metrics by another engine's names, too, for dashboards and gateways that expect them: "
    "vllm."
)
