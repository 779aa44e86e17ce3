"""Targets: the kinds of servers to load, by URL scheme. A new kind needs one line here."""

from __future__ import annotations

from baton.api.errors import ConfigError
from baton.registry import Registry
from loadtest.targets.base import OpenTarget, Target, TargetOptions

TARGETS: Registry[OpenTarget] = Registry(
    "scheme of a target",
    {
        "grpc": "loadtest.targets.baton_grpc:open_target",
        "http": "loadtest.targets.openai_http:open_target",
        "https": "loadtest.targets.openai_http:open_target",
    },
)


async def open_target(options: TargetOptions) -> Target:
    """Connect to a server.

    Raises ConfigError for an unknown URL scheme, and TargetError if the server does not answer.
    """
    scheme, separator, rest = options.url.partition("://")
    if not separator or not rest:
        known = ", ".join(TARGETS.names())
        raise ConfigError(
            f"target: must be SCHEME://ADDRESS with a scheme of {known}, got {options.url!r}"
        )
    return await TARGETS.load(scheme)(options)
