"""Process life: run a program's main coroutine, handle its signals, and end its process."""

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

# Time that a process gets, after its engine died, to log the reason, write a dump and close files.
END_AFTER_DEATH_S = 3.0
_PARENT_GRACE_S = 5.0
# Highest limit of descriptors to set, because some containers allow absurdly high limits.
_MAX_DESCRIPTORS = 2**20


def run_program(
    main: Callable[[], Coroutine[Any, Any, None]], log: LogOptions = LogOptions()
) -> int:
    """Run a program's main coroutine to its end; returns the exit code.

    Raises:
        BatonError: options, files or peers have a problem.
    """
    # Import here, because `--help` needs no event loop and should be fast.
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
        # At exit the interpreter would collect garbage. With a node's objects this takes seconds,
        # in which the node's memory and cores are not free for other processes. No object needs
        # finalizing.
        gc.freeze()
    return 0


async def _end_if_dead(main: Coroutine[Any, Any, None]) -> None:
    """Run a program's main coroutine on an event loop, after starting the loop's worker threads.

    From then on, the process writes the stacks of its threads and tasks when it gets SIGUSR2.

    If the engine dies, the process is ended at once: a dead engine may leave threads that never
    end, and the event loop and the interpreter would wait for these threads at exit.
    """
    import asyncio

    from baton.telemetry.stack_dump import dump_stacks_at_signal

    dump_stacks_at_signal(asyncio.get_running_loop())
    try:
        _start_workers()
        await main
    except EngineDeadError as error:
        end_dead(error)


def _start_workers() -> None:
    """Start all worker threads of the event loop now, because later the system may refuse."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    num_workers = min(32, (os.cpu_count() or 1) + 4)  # asyncio's default number of threads
    workers = ThreadPoolExecutor(num_workers, thread_name_prefix="asyncio")
    are_started = threading.Barrier(num_workers + 1)
    for _ in range(num_workers):
        workers.submit(are_started.wait)
    are_started.wait()
    asyncio.get_running_loop().set_default_executor(workers)


def end_dead(error: EngineDeadError) -> NoReturn:
    """Print the error, and end this process without waiting for threads."""
    from baton.telemetry.logs import close_logging

    end_within(END_AFTER_DEATH_S)
    print_error(error)
    close_logging()
    os._exit(1)


def end_within(timeout_s: float) -> None:
    """Let the kernel end this process after ``timeout_s``, wherever it hangs; safe from any thread.

    SIGALRM needs no thread, descriptor, memory or interpreter of the process. Only an
    uninterruptible system call delays the end. A later call can only shorten the time.
    """
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if not left_s or timeout_s < left_s:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)


def _accept_alarm() -> None:
    """Let SIGALRM end this process, even if its parent let it ignore or block the signal."""
    if signal.getsignal(signal.SIGALRM) is signal.SIG_IGN:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open descriptors as far as the system allows.

    The limit is often only 1,024, because programs that use `select` need a low limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    # If the limit cannot be raised, the program still works with few connections.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_descriptors_allowed() -> int:
    """Return the number of descriptors that the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MAX_DESCRIPTORS)


def print_error(error: object) -> None:
    """Print an error as one line on standard error, with unprintable characters escaped."""
    text = printable(" ".join(str(error).split()))
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


def stop_event(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; a second signal ends the process at once.

    Each signal is logged, so that the log shows why the process ended.
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
    """End this process when its parent ends, even if the parent is killed.

    `baton up` gives each child the read end of a pipe that nobody writes to. At the end of file,
    the parent is gone.
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
        # This is reached only if the signal did not end the process.
        os._exit(1)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()
