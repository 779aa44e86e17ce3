"""Process 1 of a host: gives the host its own view of the machine, then waits for its maker's end.

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
    """Set the host up, say "ready", and end when standard input does.

    Args:
        name: the host's name.
        names_file: the host's /etc/hosts.
    """
    socket.sethostname(name)
    # /sys must show the devices of the host's network; no memory is shared with other hosts.
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("-t", "tmpfs", "-o", "size=512m", "tmpfs", "/dev/shm")
    _mount("--bind", names_file, "/etc/hosts")
    # Without a name server's address, the look-up of a name that is not in the file fails at once.
    _mount("--bind", "/dev/null", "/etc/resolv.conf")
    _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", "/mnt")  # a small disk for logs and dumps
    # Nobody else has this host's addresses, so that it may use them at once.
    Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _reap() -> None:
    """Wait for ended processes whose parents have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
