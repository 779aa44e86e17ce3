"""Environment: the load generator's machine, recorded so that a run's figures can be judged."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from baton.processes.cores import usable_cores
from baton.version import __version__

_PACKAGES = ("grpcio", "aiohttp", "uvloop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine on which the load generator ran, which may not be the server's.

    Attributes:
        num_cpus: cores that this process may use.
        load_average: the machine's load average over the minute before the run.
    """

    started_at: str
    baton: str
    python: str
    platform: str
    packages: dict[str, str]
    num_cpus: int
    load_average: float


def environment() -> Environment:
    return Environment(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        baton=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: version(name) for name in _PACKAGES},
        num_cpus=len(usable_cores()),
        load_average=os.getloadavg()[0],
    )
