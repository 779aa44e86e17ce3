"""Program reaper: takes the place of a program template, to report how forked programs end.

A template that need not fork any more replaces itself by this program (`exec`). The process keeps
its id and its children (the forked programs), but frees the memory of the modules that the template
imported. The reaper imports only the standard library, and runs as a file, so that not even `baton`
is imported:

    python program_reaper.py CONTROL DESCRIPTOR:PID ...
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    """Report the end of each program; return when the parent is gone.

    Args:
        words: descriptor of the socket to the parent; then the descriptor and id of each program's
            process.
    """
    control = socket.socket(fileno=int(words[0]))
    pairs = (word.split(":") for word in words[1:])
    programs = {int(descriptor): int(pid) for descriptor, pid in pairs}
    poll = select.poll()
    for descriptor in (control.fileno(), *programs):
        poll.register(descriptor, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready not in programs:
                if not control.recv(1):
                    return
                continue
            pid = programs.pop(ready)
            poll.unregister(ready)
            os.close(ready)
            _, status = os.waitpid(pid, 0)
            event = {"pid": pid, "returncode": os.waitstatus_to_exitcode(status)}
            with contextlib.suppress(OSError):  # the next receive notices that the parent is gone
                control.send(json.dumps(event).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
