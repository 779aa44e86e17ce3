"""LogOptions: which messages a program logs, and in which format."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import ConfigError
from baton.options import check_limits, option

# Baton's packages, whose debug lines may be logged. Libraries log only from `info` on, because
# debug lines of gRPC and asyncio are noise.
OURS = (
    "baton", "router", "prefill_node", "decode_node", "node_runtime", "sim_node", "loadtest",
    "engine", "kvconnector", "models", "baton_kernels",
)  # fmt: skip
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Options of a program's log on standard error; raises ConfigError for invalid values."""

    log_level: str = option(
        "info",
        choices=LOG_LEVELS,
        parse=lambda _, text: text.lower(),
        help="Lowest level of messages to log.",
    )
    log_modules: tuple[str, ...] = option(
        (),
        name="log_module",
        help="MODULE=LEVEL: lowest level to log for a module and all modules in it, such as "
        "kvconnector.protocol=debug.",
    )
    log_format: str = option(
        "text",
        choices=LOG_FORMATS,
        help="Format of log lines: for people (text) or for programs (json).",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        for one in self.log_modules:
            module, _, level = one.partition("=")
            check_module("log_module", module)
            if level not in LOG_LEVELS:
                known = ", ".join(LOG_LEVELS)
                raise ConfigError(f"log_module: the level must be one of {known}, got {one!a}")


def check_module(field: str, module: str) -> None:
    """Raise ConfigError unless a module is one of Baton's packages, or is in such a package."""
    if module.split(".")[0] not in OURS:
        known = ", ".join(OURS)
        raise ConfigError(f"{field}: must be one of {known}, or a module in one, got {module!a}")
