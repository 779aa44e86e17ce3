"""Round trips of TCP paths, as the kernel measures them.

The kernel measures each acknowledged segment. So the shortest time is the round trip of the path:
neither KV that waits for the link nor threads that wake up late make this time longer.
"""

from __future__ import annotations

import socket
import struct

# `tcpi_min_rtt` of Linux' struct tcp_info: the shortest time of some minutes, in microseconds
_OFFSET, _MIN_RTT = 148, struct.Struct("=I")
_UNKNOWN = 2**32 - 1


def shortest_round_trip_s(connection: socket.socket) -> float:
    """Return the shortest recent round trip of a TCP connection in seconds; 0.0: unknown.

    Raises OSError if the socket has no TCP connection.
    """
    if not hasattr(socket, "TCP_INFO"):  # not Linux
        return 0.0
    size = _OFFSET + _MIN_RTT.size
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    if len(info) < size:  # an old kernel
        return 0.0
    (microseconds,) = _MIN_RTT.unpack_from(info, _OFFSET)
    return 0.0 if microseconds == _UNKNOWN else float(microseconds) / 1e6
