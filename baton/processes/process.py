"""Process life: one-line errors, stop signals, and never outliving the parent."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from baton.api.errors import EngineDeadError
from baton.api.printable import printable
from baton.processes.child_processes import PARENT_PIPE_VARIABLE
from baton.telemetry.log_options import LogOptions

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

# How long a dead engine's process may take to log why it died, write its dump and close its files.
END_AFTER_DEATH_S = 3.0
_PARENT_GRACE_S = 5.0
_MAX_DESCRIPTORS = 2**20  # containers have limits that no machine can keep


def run_program(
    main: Callable[[], Coroutine[Any, Any, None]], log: LogOptions = LogOptions()
) -> int:
    """Run a program's main coroutine to its end; returns the exit code.

    Raises:
        BatonError: what is wrong with options, files or peers.
    """
    # Imported here: who asks for help does not wait for it.
    import uvloop

    from baton.telemetry.logs import close_logging, set_up_logging

    watch_parent()
    _accept_alarm()
    try:
        set_up_logging(log.log_level, log.log_format, log.log_modules)
        raise_descriptor_limit()
        uvloop.run(_end_if_dead(main()))
        logger.info("stopped")
    except KeyboardInterrupt:
        return 130
    finally:
        close_logging()
        # The interpreter looks for garbage when it ends: of a node's objects for seconds, in which
        # others wait for its memory and cores. Nothing here has to be found to be given back.
        gc.freeze()
    return 0


async def _end_if_dead(main: Coroutine[Any, Any, None]) -> None:
    """Run a program's main coroutine on a loop whose worker threads run already.

    Ends the process at once when its engine is dead.

    A dead engine may leave threads that never end. When they end, the event loop and the
    interpreter wait for all threads, and start one more to do so.
    """
    try:
        _start_workers()
        await main
    except EngineDeadError as error:
        end_dead(error)


def _start_workers() -> None:
    """Start all worker threads of the running loop now: later the system may allow none."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    num_workers = min(32, (os.cpu_count() or 1) + 4)  # as many as the loop would start by itself
    workers = ThreadPoolExecutor(num_workers, thread_name_prefix="asyncio")
    are_started = threading.Barrier(num_workers + 1)
    for _ in range(num_workers):
        workers.submit(are_started.wait)
    are_started.wait()
    asyncio.get_running_loop().set_default_executor(workers)


def end_dead(error: EngineDeadError) -> NoReturn:
    """Print why this process ends, and end it without waiting for its threads."""
    from baton.telemetry.logs import close_logging

    end_within(END_AFTER_DEATH_S)
    print_error(error)
    close_logging()
    os._exit(1)


def end_within(timeout_s: float) -> None:
    """Have the kernel end this process if it still runs after this time; safe from any thread.

    The kernel needs no thread, descriptor, memory or interpreter of the process: SIGALRM ends the
    process wherever it hangs, except in a system call that no signal interrupts. A later call can
    only shorten the time.
    """
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if not left_s or timeout_s < left_s:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)


def _accept_alarm() -> None:
    """Let SIGALRM end this process, even if its parent had the signal ignored or blocked."""
    if signal.getsignal(signal.SIGALRM) is signal.SIG_IGN:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def raise_descriptor_limit() -> None:
    """Let the process open as many descriptors as it may be allowed.

    The soft limit is often 1,024 still, for the sake of programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # what there is is enough for few connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_descriptors_allowed() -> int:
    """Return how many descriptors the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MAX_DESCRIPTORS)


def print_error(error: object) -> None:
    """Print an error as one line on standard error; it may quote a server or a file."""
    text = printable(" ".join(str(error).split()))
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


def stop_event(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; a second one ends the process at once.

    Each signal is logged, so that a log's last lines say why its process ended.
    """
    import asyncio

    event = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if event.is_set():
            os._exit(130)
        logger.info("told to stop (%s)", number.name)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return event


def watch_parent() -> None:
    """End this process when the one that started it ends, however that ends.

    `baton up` hands each child the reading end of a pipe that it never writes to: end of file
    means that it is gone. Works after kill -9 of the parent, too.
    """
    value = os.environ.pop(PARENT_PIPE_VARIABLE, "")
    if not value.isdigit():
        return
    descriptor = int(value)

    def wait() -> None:
        while True:
            try:
                if not os.read(descriptor, 1):
                    break
            except InterruptedError:
                continue
            except OSError:
                break
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_PARENT_GRACE_S)
        os._exit(1)  # it did not stop by itself

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()
