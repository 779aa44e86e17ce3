"""Rate headers: what is left of a key's limits per minute, as OpenAI's API says it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from router.gate.rate_limits import REQUESTS, TOKENS, Rate

_WORDS = {REQUESTS: "requests", TOKENS: "tokens"}


def rate_headers(rates: Mapping[str, Rate]) -> dict[str, str]:
    """Of each limit what it is, what is left, and when all of it is there again."""
    headers = {}
    for kind, rate in rates.items():
        word = _WORDS[kind]
        headers[f"X-RateLimit-Limit-{word.title()}"] = f"{rate.limit:.0f}"
        headers[f"X-RateLimit-Remaining-{word.title()}"] = f"{math.floor(rate.remaining)}"
        headers[f"X-RateLimit-Reset-{word.title()}"] = f"{math.ceil(1000 * rate.reset_s)}ms"
    return headers
