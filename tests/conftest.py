"""Settings for all tests. Set before torch is imported anywhere."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import HealthCheck, Phase, settings

# Tests are many small computations: more threads only make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Those that take two beside other workers' tests: who waits is to leave its core to who computes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton asks for it when it is imported

from baton.telemetry import log_options
from engine.core.kv_retention import NULL_BLOCK
from engine.core.scheduler import Scheduler
from tests.fakes.engine.dead_engines import died_on_purpose

_OF_PROCESSES = {"socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.posix_spawn"}
_seen: list[str] = []  # of these, in this test

_MEDIUM_FOLDERS = {"integration", "kernels", "numerics", "property"}

_IS_CI = bool(os.environ.get("CI"))

# No deadline, because a shared machine may stop a test for a while. The gate runs the same examples
# each time; other runs draw new examples. The gate does not shrink a failing example: shrinking may
# outlast the test's timeout, and then the timeout hides the error.
settings.register_profile(
    "baton",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=_IS_CI,
    phases=[phase for phase in Phase if not (_IS_CI and phase is Phase.shrink)],
)
settings.load_profile("baton")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: to fail small tests that start processes, and to print what tests recorded."""
    parser.addoption(
        "--no-processes", action="store_true", help="tests may start no process and open no socket"
    )
    parser.addoption(
        "--tell-properties", action="store_true", help="say what tests recorded, and its sums"
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With ``--tell-properties``, print what tests recorded, and the sums of numbers."""
    if not terminalreporter.config.getoption("--tell-properties"):
        return
    sums = Counter[str]()
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and report.user_properties:
            told = ", ".join(f"{name} {value}" for name, value in report.user_properties)
            terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {told}")
            numbers = {k: v for k, v in report.user_properties if isinstance(v, int)}
            sums.update(numbers)
    terminalreporter.write_line(f"together: {dict(sums)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of some folders as medium at least, and thorough tests as large."""
    for item in items:
        if item.get_closest_marker("thorough") is not None:
            item.add_marker(pytest.mark.large)
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in _MEDIUM_FOLDERS and item.get_closest_marker("large") is None:
            item.add_marker(pytest.mark.medium)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Note from now on what small tests must not do, if the option is given."""
    if config.getoption("--no-processes"):
        noted = _OF_PROCESSES  # the hook outlives this module's names

        def note(event: str, _: object) -> None:
            if event in noted:
                _seen.append(event)

        sys.addaudithook(note)


@pytest.fixture(autouse=True)
def is_small_if_it_says_so() -> Iterator[None]:
    """With ``--no-processes``, fail a small test that starts a process or opens a socket."""
    _seen.clear()
    yield
    if _seen:
        pytest.fail(f"to be marked as medium: {', '.join(sorted(set(_seen)))}")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restore log levels, which a program that a test runs in this process may set."""
    loggers = [logging.getLogger(name) for name in (None, *log_options.OURS)]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def schedulers() -> Iterator[WeakSet[Scheduler]]:
    """Return all schedulers that live in this process."""
    found: WeakSet[Scheduler] = WeakSet()
    init = Scheduler.__init__

    def remember(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        found.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "__init__", remember)
        yield found


@pytest.fixture(autouse=True)
def no_block_is_lost(schedulers: WeakSet[Scheduler]) -> Iterator[None]:
    """After every test, end what is open in every engine; then all blocks must be free."""
    yield
    for scheduler in list(schedulers):
        for request_id in list(scheduler.requests):
            scheduler.abort(request_id)
        held = scheduler.kv_cache_manager.block_pool.ref_counts()
        if not died_on_purpose(scheduler) and held not in ({}, {NULL_BLOCK: 1}):
            schedulers.discard(scheduler)  # once is enough
            pytest.fail(f"blocks are still held: {held}")
