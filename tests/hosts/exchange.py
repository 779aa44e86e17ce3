"""One end of an exchange of numbered datagrams; run on a host by a test.

python -m tests.hosts.exchange send ADDRESS     sends a datagram each millisecond until it is killed
python -m tests.hosts.exchange receive SECONDS  prints how many datagrams arrived
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 4000


def send(address: str) -> None:
    """Send a datagram each millisecond."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as end:
        while True:
            end.sendto(b"x" * 1000, (address, PORT))
            time.sleep(0.001)


def receive(seconds: str) -> None:
    """Print how many datagrams arrive in some seconds."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as end:
        end.bind(("::", PORT))
        end.settimeout(0.05)
        ends_at, count = time.monotonic() + float(seconds), 0
        while time.monotonic() < ends_at:
            try:
                end.recv(2000)
                count += 1
            except TimeoutError:
                pass
    sys.stdout.write(str(count))


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](sys.argv[2])
