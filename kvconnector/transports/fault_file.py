"""FaultFile: reads the faults to inject from a file while the node runs.

A load test or failure drill writes a fault spec (as for `--inject-faults`) to the file, and later
empties it to end the faults. Refuses to know: transports.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from baton.api.errors import ConfigError
from kvconnector.transports.faults import OPTION, FaultSpec

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
NO_FAULTS = FaultSpec()


class FaultFile:
    """Returns the fault file's faults; reads the file again whenever it has changed.

    Args:
        path: the fault file; a missing file raises ConfigError.
        clock: returns monotonic seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._look_at = 0.0
        self._text: str | None = None
        self._spec = NO_FAULTS
        if not path.is_file():
            raise ConfigError(f"{OPTION}: {path} is not a file")

    def __str__(self) -> str:
        return f"by the file {self._path}"

    def __call__(self) -> FaultSpec:
        """Return the present faults. An invalid spec is logged, and changes nothing; never raises.

        Looks at the file at most once per `LOOK_EVERY_S` seconds.
        """
        now = self._clock()
        if now < self._look_at:
            return self._spec
        self._look_at = now + LOOK_EVERY_S
        try:
            text = self._path.read_text(encoding="utf-8").strip()
            if text != self._text:
                self._text = text
                self._spec = FaultSpec.parse(text) or NO_FAULTS
                logger.warning("injected faults are now: %s", text or "none")
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            logger.error("%s: %s cannot be used: %s", OPTION, self._path, error)
        return self._spec


def faults_of(option: str, node_name: str) -> FaultSpec | FaultFile | None:
    """Parse ``--inject-faults``: a spec, ``@FILE``, or ``@FOLDER`` with one file per node.

    Returns None if the option is empty. Raises ConfigError for a bad option.
    """
    if not option.startswith("@"):
        return FaultSpec.parse(option)
    path = Path(option[1:])
    return FaultFile(path / node_name if path.is_dir() else path)
