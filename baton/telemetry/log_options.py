"""LogOptions: what is logged, and how."""

from __future__ import annotations

from dataclasses import dataclass

from baton.options import check_limits, option

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Of a program's log on standard error; raises ConfigError for what is unknown."""

    log_level: str = option(
        "info",
        choices=LOG_LEVELS,
        parse=lambda _, text: text.lower(),
        help="What is logged: this and worse.",
    )
    log_format: str = option(
        "text", choices=LOG_FORMATS, help="Lines for people (text) or for programs (json)."
    )

    def __post_init__(self) -> None:
        check_limits(self)
