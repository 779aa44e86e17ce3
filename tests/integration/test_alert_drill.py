"""Alerts in a fleet whose parts are killed, stopped, spoiled and overrun: each fires, and clears
when it is mended. And none fires while nothing is wrong, nor beside what has to.

The rules are those of `deploy/observability/rules.yaml` with shorter times, so that a drill takes
minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton import Client, SamplingParams
from baton.api.errors import BatonError
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.outside.prometheus import NEEDS_PROMETHEUS, Prometheus, scraping, wait_for_targets
from tests.fakes.processes.deployments import READY_TIMEOUT_S, run_deployment
from tests.fakes.time.waiting import wait_until
from tests.integration.test_prometheus import RULES

pytestmark = [
    NEEDS_PROMETHEUS, pytest.mark.large, pytest.mark.lengthy, pytest.mark.nixl,
    pytest.mark.timeout(1800),
]  # fmt: skip

# What cannot be brought about from outside, and why.
NOT_DRILLED = {
    "BatonBlocksLeaked": "a defect: a fleet without it has no leak",
    "BatonBlocksMisowned": "a defect as well",
}

SCRAPE_S = 3.0  # a page of a node that is stuck takes two
FIRES_S = CLEARS_S = 120.0
# In place of those of the rules: windows hold some scrapes, and nothing is waited for long.
SHORTER = (
    (r"\[\d+m\]", "[20s]"),
    (r"\[45s\]", "[12s]"),
    (r"offset 10m", "offset 30s"),
    (r"for: \d+[ms]", "for: 3s"),
    (r"interval: \d+s", "interval: 3s"),
)
# A page with a time, since who is down and comes back has another port.
QUIET_S = float(os.environ.get("BATON_QUIET_S", "30"))
NODES = ("p0", "p1", "d0", "d1")
# While nodes come and go, these may fire as well.
COMING_AND_GOING = frozenset(
    {
        "BatonTargetGone", "BatonNodeLost", "BatonPairDown", "BatonNodeEjected",
        "BatonRequestsRetried", "BatonRequestsFail", "BatonTransfersFail", "BatonQuarantineGrows",
    }
)  # fmt: skip


class Load:
    """Requests, some at a time, whatever becomes of them."""

    def __init__(
        self, address: str, at_once: int, num_prompt: int = 80, max_tokens: int = 16
    ) -> None:
        self._address = address
        self._num_prompt, self._max_tokens = num_prompt, max_tokens
        self._over = threading.Event()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._num_open = 0
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(at_once)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._may_go_on.set()
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No request of these is open."""
        self._may_go_on.clear()
        wait_until(lambda: not self._num_open, "the end of open requests", timeout_s=40)
        yield
        self._may_go_on.set()

    def _run(self, number: int) -> None:
        params = SamplingParams(max_tokens=self._max_tokens, ignore_eos=True)
        with Client(self._address) as client:
            while not self._over.is_set():
                self._may_go_on.wait()
                number += 1000
                draw = random.Random(number)  # so that no cache has it
                prompt = [draw.randrange(5, 4000) for _ in range(self._num_prompt)]
                self._num_open += 1
                try:
                    client.generate(prompt, params, timeout_s=30)
                except BatonError:
                    self._over.wait(0.2)
                finally:
                    self._num_open -= 1


@dataclass
class Fleet:
    running: LocalDeployment
    prometheus: Prometheus
    faults: Path
    folder: Path
    load: Load = field(init=False)

    @property
    def address(self) -> str:
        return self.running.config.listen

    def signal(self, number: signal.Signals, *names: str) -> None:
        for name in names:
            self.running.child(name).process.send_signal(number)

    def inject(self, spec: str, *names: str) -> None:
        for name in names:
            (self.faults / name).write_text(spec)

    def restart(self, *names: str, options: Sequence[str] = (), is_ready: bool = True) -> None:
        for name in names:
            self.running.restart(name, *options)
        if is_ready:
            self.running.wait_ready(READY_TIMEOUT_S)
        self.tell_targets()

    def replace(self, *names: str, options: Sequence[str] = ()) -> None:
        """Have processes end as they should, and start them again."""
        self.signal(signal.SIGTERM, *names)
        for name in names:
            self.running.child(name).process.wait(30)
        self.restart(*names, options=options)

    def tell_targets(self) -> None:
        """Nodes that were restarted have other ports."""
        pages = []
        for child in self.running.children:
            found = re.findall(r"metrics at http://(\S+)/metrics", child.log.read_text("utf-8"))
            pages += found[-1:]
        made = [{"targets": pages, "labels": {"job": "baton-node"}}]
        (self.folder / "targets.json").write_text(json.dumps(made))

    @contextlib.contextmanager
    def pausing(self, stop_s: float, go_s: float, *names: str) -> Iterator[None]:
        """Stop and continue these processes by turns, so that they seldom get the processor."""
        over = threading.Event()

        def pause() -> None:
            while not over.is_set():
                self.signal(signal.SIGSTOP, *names)
                over.wait(stop_s)
                self.signal(signal.SIGCONT, *names)
                over.wait(go_s)

        thread = threading.Thread(target=pause)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("drill")
    faults = folder / "faults"
    faults.mkdir()
    for name in NODES:
        (faults / name).write_text("")
    rules = RULES.read_text(encoding="utf-8")
    for pattern, shorter in SHORTER:
        rules = re.sub(pattern, shorter, rules)
    (folder / "rules.yaml").write_text(rules)
    targets = folder / "targets.json"
    with run_deployment(
        "--num-blocks", "200", "--kv-digests", "--engine-timeout-s", "0",
        "--metrics-listen", "127.0.0.1:0", "--inject-faults", f"@{faults}",
        "--drain-timeout-s", "5",
        http=True,
        num_prefill=2,
        num_decode=2,
        router_args=[
            "--pair-timeout-s", "1", "--return-timeout-s", "1", "--max-queued-requests", "40",
            # A node that stands still for a second here often waits for the processor.
            "--node-timeout-s", "4",
        ],
        log_folder=folder / "logs",
    ) as running:  # fmt: skip
        pages = {"baton-router": [running.config.http_listen], "baton-node": []}
        with scraping(
            pages, folder, free_address(), folder / "rules.yaml", SCRAPE_S, targets_file=targets
        ) as prometheus:
            made = Fleet(running, prometheus, faults, folder)
            made.tell_targets()
            with Load(running.config.listen, 2) as made.load:
                wait_for_targets(prometheus, 1 + len(NODES))
                time.sleep(20)  # so that windows are full
                yield made


def test_no_alert_fires_while_nothing_is_wrong(fleet: Fleet) -> None:
    until = time.monotonic() + QUIET_S
    while time.monotonic() < until:
        assert fleet.prometheus.firing() == set()
        time.sleep(1)


def drill(
    fleet: Fleet,
    alerts: set[str],
    spoiled: Callable[[], contextlib.AbstractContextManager[object]],
    may: frozenset[str] = frozenset(),
) -> None:
    """Spoil something until these alerts fire and no others, mend it, and see them clear.

    Args:
        spoiled: makes a context in which something is broken; its end mends that.
        may: other alerts that may fire.
    """
    seen: set[str] = set()

    def firing() -> set[str]:
        time.sleep(0.5)
        found = fleet.prometheus.firing()
        seen.update(found)
        return found

    def all_fired() -> bool:
        firing()
        return alerts <= seen

    wait_until(lambda: not firing(), "silence before", timeout_s=CLEARS_S)
    seen.clear()
    with spoiled(), contextlib.suppress(AssertionError):
        wait_until(all_fired, "alerts", timeout_s=FIRES_S)
    assert alerts <= seen, f"did not fire: {alerts - seen}; did: {seen}"
    wait_until(lambda: not firing() & alerts, f"silence of {alerts}", timeout_s=CLEARS_S)
    assert seen <= alerts | may, f"fired without need: {seen - alerts - may}"


@contextlib.contextmanager
def faulty(fleet: Fleet, spec: str, *names: str) -> Iterator[None]:
    fleet.inject(spec, *names)
    try:
        yield
    finally:
        fleet.inject("", *names)


def test_a_decode_node_that_is_killed(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def killed() -> Iterator[None]:
        fleet.signal(signal.SIGKILL, "d0")
        yield
        fleet.restart("d0")

    drill(fleet, {"BatonNodeLost", "BatonTargetGone", "BatonPairDown"}, killed, COMING_AND_GOING)


def test_prefill_nodes_that_stand_still(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def still() -> Iterator[None]:
        fleet.signal(signal.SIGSTOP, "p0", "p1")
        yield
        fleet.signal(signal.SIGCONT, "p0", "p1")
        fleet.running.wait_ready(READY_TIMEOUT_S)

    alerts = {"BatonNoNode", "BatonNodeLost", "BatonPairDown", "BatonRequestsFail"}
    drill(fleet, alerts, still, COMING_AND_GOING)


def test_prefill_nodes_that_stop_with_blocks_on_the_wire(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        share = "max(baton_blocks_quarantined / baton_blocks)"
        with Load(fleet.address, 8, num_prompt=1200):
            for _ in range(5):  # until they stopped in a moment with much on the wire
                time.sleep(3)
                fleet.signal(signal.SIGSTOP, "p0", "p1")
                time.sleep(3 * SCRAPE_S)
                if float(fleet.prometheus.query(share)[0]["value"][1]) > 0.1:
                    break
                fleet.signal(signal.SIGCONT, "p0", "p1")
                fleet.running.wait_ready(READY_TIMEOUT_S)
            yield
        fleet.signal(signal.SIGCONT, "p0", "p1")
        fleet.running.wait_ready(READY_TIMEOUT_S)

    may = COMING_AND_GOING | {"BatonNoNode", "BatonFirstTokensSlow", "BatonRequestsRefused"}
    drill(fleet, {"BatonQuarantineGrows"}, stopped, may)


def test_a_network_that_loses_all_between_nodes(fleet: Fleet) -> None:
    alerts = {"BatonPairDown", "BatonNoNode", "BatonRequestsFail"}
    drill(fleet, alerts, lambda: faulty(fleet, "drop=1", "p0", "p1"), COMING_AND_GOING)


def test_memory_that_spoils_what_arrives(fleet: Fleet) -> None:
    drill(fleet, {"BatonKvCorrupted"}, lambda: faulty(fleet, "corrupt=0.2", "d0", "d1"))


def test_messages_that_are_changed_on_their_way(fleet: Fleet) -> None:
    drill(fleet, {"BatonMessagesForged"}, lambda: faulty(fleet, "alter=0.02", "d0", "d1"))


def test_writes_that_cannot_be_posted(fleet: Fleet) -> None:
    alerts = {"BatonTransfersFail", "BatonRequestsRetried"}
    may = frozenset({"BatonNodeEjected", "BatonRequestsFail"})
    drill(fleet, alerts, lambda: faulty(fleet, "fail_post=0.3", "p0", "p1"), may)


def test_a_node_that_can_write_nothing(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def mute() -> Iterator[None]:
        # So many that some go to it: who fails is not asked where another is free.
        with faulty(fleet, "fail_post=1", "p1"), Load(fleet.address, 8):
            yield

    may = frozenset({"BatonTransfersFail", "BatonRequestsRetried", "BatonRequestsFail"})
    drill(fleet, {"BatonNodeEjected"}, mute, may)


def test_more_than_the_fleet_can_take(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def overrun() -> Iterator[None]:
        with Load(fleet.address, 60, num_prompt=1500, max_tokens=200):
            yield

    alerts = {
        "BatonRequestsRefused", "BatonFirstTokensSlow", "BatonKvFull", "BatonQueueLong",
        "BatonRequestsPreempted",
    }  # fmt: skip
    # (Who lost its blocks is placed again, and some are late for their clients.)
    may = frozenset({"BatonTokensSlow", "BatonRequestsFail", "BatonRequestsRetried"})
    drill(fleet, alerts, overrun, may)


def test_an_engine_that_is_stuck(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def stuck() -> Iterator[None]:
        fleet.restart("d1", options=["--inject-faults", "hang_engine=40"])
        yield
        fleet.restart("d1")

    drill(fleet, {"BatonNodeStuck"}, stuck, COMING_AND_GOING)


def test_decode_nodes_that_get_little_of_the_processor(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        with (
            fleet.load.paused(),
            Load(fleet.address, 6, max_tokens=2),
            fleet.pausing(0.7, 0.1, "d0", "d1"),
        ):
            yield

    drill(fleet, {"BatonTokensSlow"}, slow, COMING_AND_GOING | {"BatonNoNode"})


def test_a_router_that_gets_little_of_the_processor(fleet: Fleet) -> None:
    drill(
        fleet,
        {"BatonRouterOverloaded"},
        lambda: fleet.pausing(2.4, 0.1, "router"),
        COMING_AND_GOING
        | {"BatonNoNode", "BatonRequestsRefused", "BatonFirstTokensSlow", "BatonTokensSlow"},
    )


def test_a_request_that_nodes_die_of(fleet: Fleet) -> None:
    @contextlib.contextmanager
    def deadly() -> Iterator[None]:
        with fleet.load.paused():
            fleet.inject("kill=Grant:send:1", "d0", "d1")
            time.sleep(1)
            with Client(fleet.address) as client, pytest.raises(BatonError, match="died"):
                client.generate([5, 6, 7], SamplingParams(max_tokens=4), timeout_s=30)
            fleet.inject("", "d0", "d1")
        yield
        fleet.restart("d0", "d1")

    drill(fleet, {"BatonRequestKillsNodes"}, deadly, COMING_AND_GOING | {"BatonNoNode"})


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with other weights."""
    folder = tmp_path_factory.mktemp("model") / "other"
    shutil.copytree(DEMO_MODEL, folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        generator = torch.Generator().manual_seed(1)
        for weight in weights.values():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator)
                weight += (0.01 * noise).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_a_node_of_another_model(fleet: Fleet, other_model: Path) -> None:
    @contextlib.contextmanager
    def other() -> Iterator[None]:
        fleet.restart("d1", options=["--model", str(other_model)], is_ready=False)
        yield
        fleet.restart("d1")

    drill(fleet, {"BatonNodeOfAnotherModel"}, other, COMING_AND_GOING)


def test_a_fleet_that_is_replaced_by_one_of_another_model(fleet: Fleet, other_model: Path) -> None:
    @contextlib.contextmanager
    def other() -> Iterator[None]:
        with fleet.load.paused():
            fleet.replace(*NODES, options=["--model", str(other_model)])
        yield
        with fleet.load.paused():
            fleet.replace(*NODES)

    may = COMING_AND_GOING | {"BatonNoNode", "BatonNodeOfAnotherModel"}
    drill(fleet, {"BatonModelChanged"}, other, may)
