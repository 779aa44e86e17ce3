"""How a process of ours is started: by which command, and what it inherits of the environment."""

from __future__ import annotations

import os
import sys

# Of the variables that give a program its options: BATON_MAX_MODEL_LEN for --max-model-len.
ENVIRONMENT_PREFIX = "BATON"
PARENT_PIPE_VARIABLE = f"{ENVIRONMENT_PREFIX}_PARENT_PIPE"
# Starts one of our modules. (-P: not what has its name in the folder that the user is in, nor
# what has the name of a module that it imports.)
PYTHON_MODULE = (sys.executable, "-P", "-m")

# Options of which each process of a fleet has its own, or none: what the environment says of them,
# it says of whoever reads it first.
_OF_ONE_PROCESS = frozenset(
    f"{ENVIRONMENT_PREFIX}_{option}"
    for option in (
        "NAME", "LISTEN", "NODE_LISTEN", "METRICS_LISTEN", "KV_LISTEN", "REUSE_PORT", "CPU_LIST",
        "TLS_CERT", "TLS_KEY", "TLS_CA", "TLS_REQUIRE_CLIENT_CERTS",
    )
)  # fmt: skip


def fleet_environment() -> dict[str, str]:
    """Return what a fleet's processes inherit of this one's environment."""
    return {name: text for name, text in os.environ.items() if name not in _OF_ONE_PROCESS}
