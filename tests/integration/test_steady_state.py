"""Check that warm nodes need nothing from the operating system that it may refuse.

The engine's thread and the KV I/O thread open no file, no socket, no thread and no process while
they serve. So a full disk or a used-up limit ends neither thread. An audit hook of the interpreter
in the real processes sees what Python code opens.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import Client, SamplingParams, StructuredOutput
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.processes.deployments import READY_TIMEOUT_S, deployment_config
from tests.fakes.time.waiting import wait_until
from tests.integration.test_deaths import TROUBLED, node_names

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

# Files that are read, or places in the code, and what fails alone when the system refuses.
ALLOWED = (
    "/proc/meminfo",  # PagesAhead, which then finds no memory ahead
    # RoundTrips, which then finds no round trip, and duplicates sockets
    "/proc/self/fdinfo",
    "fences.py:_read <",
    "/proc/self/cgroup",
    "/sys/fs/cgroup",
)
STANDSTILL_S, NUM_STANDSTILLS = 2.0, 5


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "events"


@pytest.fixture(scope="module")
def deployment(audit: Path) -> Iterator[LocalDeployment]:
    config = deployment_config("--num-blocks", "400")
    with pytest.MonkeyPatch.context() as patched:
        path = os.pathsep.join([str(TROUBLED), os.environ.get("PYTHONPATH", "")])
        patched.setenv("PYTHONPATH", path)
        patched.setenv("BATON_TEST_AUDIT", str(audit))
        running = LocalDeployment(config).__enter__()
    try:
        running.wait_ready(READY_TIMEOUT_S)
        yield running
    finally:
        running.stop()


def serve_each_kind(address: str) -> None:
    """Send one request of each kind that takes a different way through the engine."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with Client(address) as client:
        for params in (
            SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, top_k=50, seed=3),
            SamplingParams(max_tokens=10, logprobs=3),
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=20, structured_output=StructuredOutput(json_schema=schema)),
        ):
            for prompt in (list(range(5, 200)), [5, 6, 7]):
                for _ in client.stream(prompt, params, timeout_s=60):
                    pass


def test_a_warm_node_opens_nothing_on_the_threads_that_must_not_fail(
    deployment: LocalDeployment, audit: Path
) -> None:
    address = deployment.config.listen
    serve_each_kind(address)
    assert "engine " in audit.read_text()  # the hook works
    num_before = len(audit.read_text().splitlines())
    for _ in range(3):
        serve_each_kind(address)
    events = audit.read_text().splitlines()[num_before:]
    refused = [line for line in events if not any(name in line for name in ALLOWED)]
    assert Counter(refused).most_common(10) == []


def test_standstills_leave_no_descriptor_and_no_thread_behind(
    deployment: LocalDeployment,
) -> None:
    address, before = deployment.config.listen, dict[str, tuple[int, int]]()
    for number in range(NUM_STANDSTILLS + 1):
        stand_still(deployment, "pd"[number % 2] + "0")
        serve_each_kind(address)
        if number == 0:  # what the first standstill opens may stay open
            before = {name: usage(deployment, name) for name in ("p0", "d0")}
    # A broken link to the router may be closed a moment later.
    wait_until(
        lambda: all(
            now <= then
            for name in before
            for now, then in zip(usage(deployment, name), before[name], strict=True)
        ),
        f"as many descriptors and threads as before, {before}",
    )


def stand_still(deployment: LocalDeployment, name: str) -> None:
    """Stop a node until its router has missed it, and wait until it is back."""
    process = deployment.child(name).process
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: name not in node_names(deployment), "the router to miss it")
        time.sleep(STANDSTILL_S - 1.0)  # its peer misses it, too
    finally:
        process.send_signal(signal.SIGCONT)
    wait_until(lambda: name in node_names(deployment), "the node to be back")
    deployment.wait_ready(READY_TIMEOUT_S)


def usage(deployment: LocalDeployment, name: str) -> tuple[int, int]:
    """Return the numbers of a node's descriptors and threads."""
    folder = Path(f"/proc/{deployment.child(name).process.pid}")
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))
