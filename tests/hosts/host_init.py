"""Process 1 of a host: sets the host up, then waits until its parent has closed standard input.

Runs in new namespaces, before anything of Baton: only the standard library is imported. When this
process ends, the kernel ends all other processes of the host, and removes the host's network.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main(name: str, names_file: str) -> None:
    """Set the host up, print "ready", and end when standard input ends.

    Args:
        name: the host's name.
        names_file: the host's /etc/hosts.
    """
    socket.sethostname(name)
    # /sys must show the devices of the host's network, and hosts must not share memory.
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("-t", "tmpfs", "-o", "size=512m", "tmpfs", "/dev/shm")
    _mount("--bind", names_file, "/etc/hosts")
    # Without a name server's address, the look-up of a name that is not in the file fails at once.
    _mount("--bind", "/dev/null", "/etc/resolv.conf")
    _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", "/mnt")  # a small disk for logs and dumps
    # Use IPv6 addresses at once, without a check for duplicates: no other host has them.
    Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _reap() -> None:
    """Collect the exit statuses of ended processes whose parents have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
