"""One of two NIXL agents on hosts of their own; run by a test.

python -m tests.hosts.dial listen           prints metadata, and ends with standard input
python -m tests.hosts.dial dial METADATA    sends to the agent with this metadata, NUM_TRIES times
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import time
from pathlib import Path

import torch

from baton.api.errors import TransferError
from kvconnector.layout import KVLayout
from kvconnector.transports.nixl.agent import NixlAgent

NUM_TRIES, POLL_S = 6, 0.3
LISTENER = "listener-1"


def count_sockets() -> int:
    """Return the number of this process's open sockets."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("socket:") for link in links)


def listen(agent: NixlAgent) -> None:
    """Let NIXL make progress until standard input ends."""
    sys.stdout.write(base64.b64encode(agent.metadata()).decode() + "\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        agent.take_notifications()
    os._exit(0)  # end like a killed process, which closes nothing in order


def dial(agent: NixlAgent, metadata: bytes) -> None:
    """Try to send messages; print whether NIXL accepted each, and the sockets after each try."""
    accepted, sockets = [], []
    for _ in range(NUM_TRIES):
        try:
            agent.add_peer(LISTENER, metadata)
            agent.notify(LISTENER, b"hello")
            accepted.append(True)
        except TransferError:
            agent.release_peer(LISTENER, [])
            accepted.append(False)
        until = time.monotonic() + POLL_S
        while time.monotonic() < until:
            agent.take_notifications()
            time.sleep(0.01)
        sockets.append(count_sockets())
    sys.stdout.write("\n" + json.dumps({"accepted": accepted, "sockets": sockets}))
    sys.stdout.flush()
    os._exit(0)


def main(verb: str, metadata: str = "") -> None:
    """Run one of the two agents."""
    memory = torch.zeros(4, 2, 4, 8)
    name = LISTENER if verb == "listen" else "dialler-1"
    agent = NixlAgent(name, [KVLayout.of(memory)], "DRAM")
    if verb == "listen":
        listen(agent)
    dial(agent, base64.b64decode(metadata))


if __name__ == "__main__":
    main(*sys.argv[1:])
