"""Alerts in a fleet whose parts are killed, stopped and spoiled: each fires, and clears when it is
mended. And none fires while nothing is wrong.

The rules are those of `deploy/observability/rules.yaml` with shorter times, so that a drill takes
minutes. What is drilled is what can be brought about from outside: a leak, an owner too few, and a
forged message are defects and attacks that a fleet without them does not have.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.api.errors import BatonError
from baton.local_deployment import LocalDeployment, LocalDeploymentConfig
from tests.fakes.prometheus import NEEDS_PROMETHEUS, Prometheus, scraping, wait_for_targets
from tests.fakes.waiting import wait_until
from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S, free_address
from tests.integration.test_prometheus import RULES

pytestmark = [
    NEEDS_PROMETHEUS, pytest.mark.large, pytest.mark.lengthy, pytest.mark.nixl,
    pytest.mark.timeout(1800),
]  # fmt: skip

SCRAPE_S = 3.0  # a page of a node that is stuck takes two
FIRES_S = CLEARS_S = 120.0
# In place of those of the rules: windows hold some scrapes, and nothing is waited for long.
SHORTER = (
    (r"\[(5|10|15)m\]", "[20s]"),
    (r"offset 10m", "offset 30s"),
    (r"for: \d+m", "for: 3s"),
)
# A page with a time, since who is down and comes back has another port.
QUIET_S = float(os.environ.get("BATON_QUIET_S", "30"))


@dataclass
class Fleet:
    running: LocalDeployment
    prometheus: Prometheus
    faults: Path
    folder: Path

    def signal(self, name: str, number: signal.Signals) -> None:
        self.running.child(name).process.send_signal(number)

    def inject(self, name: str, spec: str) -> None:
        (self.faults / name).write_text(spec)


class Load:
    """Requests, some at a time, whatever becomes of them."""

    def __init__(
        self, address: str, at_once: int, num_prompt: int = 80, max_tokens: int = 16
    ) -> None:
        self._address = address
        self._num_prompt, self._max_tokens = num_prompt, max_tokens
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(at_once)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        params = SamplingParams(max_tokens=self._max_tokens, ignore_eos=True)
        with Client(self._address) as client:
            while not self._over.is_set():
                number += 1000
                prompt = [5 + (number + i * 31) % 4000 for i in range(self._num_prompt)]
                try:
                    client.generate(prompt, params, timeout_s=30)
                except BatonError:
                    self._over.wait(0.2)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("drill")
    faults = folder / "faults"
    faults.mkdir()
    for name in ("p0", "d0", "d1"):
        (faults / name).write_text("")
    rules = RULES.read_text(encoding="utf-8")
    for pattern, shorter in SHORTER:
        rules = re.sub(pattern, shorter, rules)
    (folder / "rules.yaml").write_text(rules)
    config = LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        http_listen=free_address(),
        num_decode=2,
        router_args=["--no-local-prefill", "--pair-timeout-s", "1", "--max-queued-requests", "4"],
        node_args=[
            "--dtype", "float32", "--num-blocks", "200", "--kv-digests", "--engine-timeout-s", "0",
            "--metrics-listen", "127.0.0.1:0", "--inject-faults", f"@{faults}",
        ],
    )  # fmt: skip
    targets = folder / "targets.json"
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
        pages = {"baton-router": [config.http_listen], "baton-node": []}
        with scraping(
            pages, folder, free_address(), folder / "rules.yaml", SCRAPE_S, targets_file=targets
        ) as prometheus:
            made = Fleet(running, prometheus, faults, folder)
            tell_targets(made)
            with Load(config.listen, 2):
                wait_for_targets(prometheus, 4)
                yield made


def tell_targets(fleet: Fleet) -> None:
    """Nodes that were restarted have other ports."""
    import json

    pages = []
    for child in fleet.running.children:
        found = re.findall(r"metrics at http://(\S+)/metrics", child.log.read_text("utf-8"))
        pages += found[-1:]
    made = [{"targets": pages, "labels": {"job": "baton-node"}}]
    (fleet.folder / "targets.json").write_text(json.dumps(made))


def test_no_alert_fires_while_nothing_is_wrong(fleet: Fleet) -> None:
    time.sleep(20)  # so that windows are full
    until = time.monotonic() + QUIET_S
    while time.monotonic() < until:
        assert fleet.prometheus.firing() == set()
        time.sleep(1)


def drill(
    fleet: Fleet, alerts: set[str], spoil: Callable[[], None], mend: Callable[[], None]
) -> None:
    """Spoil something until these alerts fire, mend it, and see them clear."""
    seen: set[str] = set()

    def all_fired() -> bool:
        seen.update(fleet.prometheus.firing())
        time.sleep(0.5)
        return alerts <= seen

    spoil()
    try:
        with contextlib.suppress(AssertionError):
            wait_until(all_fired, "alerts", timeout_s=FIRES_S)
    finally:
        mend()
    assert alerts <= seen, f"did not fire: {alerts - seen}; did: {seen}"

    def none_fires() -> bool:
        time.sleep(0.5)
        return not fleet.prometheus.firing() & alerts

    wait_until(none_fires, f"silence of {alerts}", timeout_s=CLEARS_S)


def test_a_decode_node_that_is_killed(fleet: Fleet) -> None:
    def mend() -> None:
        fleet.running.restart("d0")
        fleet.running.wait_ready(READY_TIMEOUT_S)
        tell_targets(fleet)

    alerts = {"BatonNodeLost", "BatonTargetGone", "BatonRequestsRetried"}
    drill(fleet, alerts, lambda: fleet.signal("d0", signal.SIGKILL), mend)


def test_the_only_prefill_node_stands_still(fleet: Fleet) -> None:
    alerts = {"BatonNoNode", "BatonNodeLost", "BatonPairDown", "BatonRequestsFail"}
    drill(
        fleet,
        alerts,
        lambda: fleet.signal("p0", signal.SIGSTOP),
        lambda: fleet.signal("p0", signal.SIGCONT),
    )


def test_memory_that_spoils_what_arrives(fleet: Fleet) -> None:
    def each(spec: str) -> Callable[[], None]:
        def inject() -> None:
            for name in ("d0", "d1"):
                fleet.inject(name, spec)

        return inject

    drill(fleet, {"BatonKvCorrupted"}, each("corrupt=0.2"), each(""))


def test_writes_that_cannot_be_posted(fleet: Fleet) -> None:
    drill(
        fleet,
        {"BatonTransfersFail"},
        lambda: fleet.inject("p0", "fail_post=0.5"),
        lambda: fleet.inject("p0", ""),
    )


def test_more_than_the_fleet_can_take(fleet: Fleet) -> None:
    stack = contextlib.ExitStack()

    def spoil() -> None:
        load = Load(fleet.running.config.listen, 32, num_prompt=1500, max_tokens=100)
        stack.enter_context(load)

    drill(fleet, {"BatonRequestsRefused", "BatonFirstTokensSlow"}, spoil, stack.close)


def test_an_engine_that_is_stuck(fleet: Fleet) -> None:
    def mend() -> None:
        fleet.running.restart("d1")
        fleet.running.wait_ready(READY_TIMEOUT_S)
        tell_targets(fleet)

    def spoil() -> None:
        fleet.running.restart("d1", "--inject-faults", "hang_engine=40")
        fleet.running.wait_ready(READY_TIMEOUT_S)
        tell_targets(fleet)

    drill(fleet, {"BatonNodeStuck"}, spoil, mend)
