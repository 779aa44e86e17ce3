"""Options to export metrics also under the names that other engines use."""

from __future__ import annotations

COMPAT_NAMES = ("none", "vllm")
COMPAT_HELP = (
    "Show metrics also under another engine's names, for dashboards and gateways that expect "
    "them: vllm."
)
