"""Free addresses: find loopback addresses for servers that will start soon."""

from __future__ import annotations

import atexit
import socket
from collections import deque
from random import SystemRandom

from baton.api.errors import BatonError

# Ports to choose from. They are below the ephemeral ports (from 32768 on Linux), because another
# process might get an ephemeral port before the server listens on it.
_PORTS = range(10_000, 30_000)
_NUM_CLAIMS = 64  # maximum number of servers that have an address but do not listen yet

# The module `random` is not used, because tests give it the same seed in all processes.
_next_ports = deque(_PORTS)
_next_ports.rotate(SystemRandom().randrange(len(_PORTS)))
_claims: deque[socket.socket] = deque()


@atexit.register
def _close_claims() -> None:
    while _claims:
        _claims.popleft().close()


def free_address() -> str:
    """Return a loopback address on which nobody listens, and which no other caller gets.

    A process gives out each port once. This process keeps UDP sockets on the ports that it gave out
    last, so that other callers of this function do not choose them. Servers use TCP, so the sockets
    are not in their way.

    Raises:
        BatonError: all ports are taken.
    """
    for _ in _PORTS:
        _next_ports.rotate(-1)
        port = _next_ports[0]
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        if len(_claims) > _NUM_CLAIMS:
            _claims.popleft().close()
        return f"127.0.0.1:{port}"
    raise BatonError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")
