"""Work for worker processes that costs what a test says: each piece is a Python expression."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from baton.api.errors import InvalidRequestError
from baton.processes.worker_template import Work


def make_work(options: Mapping[str, str]) -> Work:
    """Make the work of a template; this takes as many seconds as the option ``load_s`` says."""
    time.sleep(float(options.get("load_s", 0)))

    def refuse(field: str) -> str:
        raise InvalidRequestError(field, "is wrong")

    def spin() -> None:
        while True:
            pass

    names = {
        "options": options, "refuse": refuse, "spin": spin, "pid": os.getpid, "sleep": time.sleep,
        "crash": os.abort,
    }  # fmt: skip

    def work(frame: bytes) -> bytes:
        return str(eval(frame.decode(), names)).encode()

    return work
