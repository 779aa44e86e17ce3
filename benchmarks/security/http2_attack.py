"""Sends one trick of `http2_tricks.py`, or all of them in turns, to one port.

The script prints the number of sent bytes and of connections as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

from tests.fakes.network.http2_tricks import TRICKS
from tests.fakes.network.raw_http2 import RawHttp2

NUM_CONNECTIONS = 8
# The router's limits are per client address, so attackers with their own address do not use up
# other clients' limits.
SOURCE = "127.0.0.2" if sys.platform == "linux" else None


async def attack(address: str, number: int | None, seconds: float) -> dict[str, int]:
    """Send a trick, or all in turns, on several connections; replace closed connections."""
    end_at = time.monotonic() + seconds
    sent = {"bytes": 0, "connections": 0}

    async def send_on(connection: int) -> None:
        tricks = itertools.islice(itertools.cycle(TRICKS), connection * 5, None)
        while (left_s := end_at - time.monotonic()) > 0:
            trick = next(tricks) if number is None else TRICKS[number]
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(left_s if number is not None else min(left_s, 3)):
                    raw = await RawHttp2.connect(address, window=trick.window, source=SOURCE)
                    sent["connections"] += 1
                    try:
                        if not trick.reads:
                            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
                        for data in trick.frames():
                            if raw.is_closed.is_set():
                                break
                            raw.send(data)
                            sent["bytes"] += len(data)
                            await raw.writer.drain()
                            await asyncio.sleep(0)
                    finally:
                        raw.writer.transport.abort()
                        await raw.close()

    await asyncio.gather(*map(send_on, range(NUM_CONNECTIONS)))
    return sent


def _take_spare_cores_only() -> None:
    """Lower the priority of this process, and of its session where the kernel shares by session."""
    os.nice(10)
    with contextlib.suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("10", "ascii")


def attack_port(address: str, part: str, seconds: str) -> None:
    """Attack one port in this process; print the results as JSON."""
    _take_spare_cores_only()
    number = None if part == "all" else int(part)
    print(json.dumps(asyncio.run(attack(address, number, float(seconds)))))
