"""Unit tests of the overload state: its signals, its refusals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.api.errors import OverloadedError
from baton.api.outputs import FinishReason
from baton.client.client import AsyncClient
from baton.serving.call_gate import CallGate
from baton.serving.rpc import RpcServer
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.gate.overload import HOLD_S, Level, LoopLag, Overload
from router.gate.resources import memory_limit_bytes, num_descriptors, resident_bytes
from router.intake.metrics import RouterMetrics
from tests.fakes.network.raw_http2 import RawHttp2, call_frames, frame
from tests.fakes.router.grpc_scene import GrpcScene, params
from tests.fakes.router.http_scene import HttpScene, on_http, until
from tests.fakes.router.router_scene import Scene, asynchronous
from tests.fakes.time.virtual_clock import VirtualClock

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]


def overloaded(**signals: float) -> Overload:
    overload = Overload()
    overload.note(signals)
    return overload


# ------------------------------------------------------------------ the state


def test_a_level_is_reached_at_once_and_left_when_all_has_been_well_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock, levels = VirtualClock(), list[Level]()
    overload = Overload(levels.append, clock=clock)

    def level() -> Level:
        return overload.state().level

    for value in (0.1, 0.8, 0.84):
        overload.note({"memory": value})
    assert levels == []
    overload.note({"memory": 0.97})
    assert level() is Level.CRITICAL
    # Just below the threshold is not well below it, however long.
    for _ in range(10):
        clock.advance(HOLD_S)
        overload.note({"memory": 0.94})
    assert level() is Level.CRITICAL
    overload.note({"memory": 0.8})
    clock.advance(HOLD_S / 2)
    overload.note({"memory": 0.8})
    assert level() is Level.CRITICAL
    overload.note({"memory": 0.96})  # not yet: the time begins anew
    overload.note({"memory": 0.8})
    clock.advance(HOLD_S / 2)
    overload.note({"memory": 0.8})
    assert level() is Level.CRITICAL
    clock.advance(HOLD_S / 2)
    overload.note({"memory": 0.8})
    assert level() is Level.SHED
    overload.note({"memory": 0.1})
    clock.advance(HOLD_S)
    overload.note({"memory": 0.1})
    assert levels == [Level.CRITICAL, Level.SHED, Level.NORMAL]
    assert caplog.messages == [
        "overload: normal -> critical (memory 97 %)",
        "overload: critical -> shed (memory 80 %)",
        "overload: shed -> normal",
    ]


def test_the_worst_signal_counts_and_is_named() -> None:
    overload = overloaded(memory=0.9, descriptors=0.86, connections=0.5, loop_lag=0.01)
    assert overload.level is Level.SHED
    assert overload.reason == "memory 90 %, descriptors 86 %"
    overload.note({"loop_lag": 2.5})
    assert (overload.level, overload.reason) == (Level.CRITICAL, "loop_lag 2.50 s")
    with pytest.raises(OverloadedError, match=r"^the router is overloaded: loop_lag 2.50 s$"):
        overload.check()
    assert overload.state().num_refused == 1


def test_connections_at_work_never_refuse_everybody() -> None:
    assert overloaded(connections=1.0).level is Level.SHED


# ------------------------------------------------------------------ the signals


@pytest.mark.medium
@asynchronous
async def test_a_loop_that_is_held_up_time_and_again_is_late_and_one_pause_is_not() -> None:
    lag = LoopLag()
    loop = asyncio.get_running_loop()

    def hold_up() -> None:
        time.sleep(0.4)  # as a callback that computes
        if again:
            loop.call_soon(hold_up)

    again = False
    loop.call_soon(hold_up)
    for _ in range(3):
        await lag.look()
    assert lag.lag_s < 0.2
    again = True
    loop.call_soon(hold_up)
    for _ in range(3):
        await lag.look()
    assert lag.lag_s > 0.2
    again = False
    for _ in range(2):
        await lag.look()
    assert lag.lag_s < 0.2


def test_descriptors_and_memory_are_those_of_this_process() -> None:
    gc.collect()  # else what earlier tests left may be closed within this one
    before = num_descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(Path(os.devnull).open("rb"))
        assert num_descriptors() == before + 50
    resident = resident_bytes()
    block = bytearray(os.urandom(1) * (64 * 2**20))
    assert resident_bytes() > resident + 16 * 2**20  # some of it may lie in pages freed before
    assert resident_bytes() < memory_limit_bytes()
    del block


_FEW_DESCRIPTORS = """
import asyncio, resource, socket
from router.gate.overload import Level, Overload
from router.gate.resources import watch_resources

async def main():
    levels = []
    overload = Overload(lambda level: levels.append(level.name))
    watching = asyncio.create_task(watch_resources(overload, lambda: 0.0))
    sockets = []
    async def grow_to(number, until):
        while len(sockets) < number:
            sockets.append(socket.socket())
        while not levels or levels[-1] != until:
            await asyncio.sleep(0.05)
    await grow_to(225, "SHED")
    await grow_to(245, "CRITICAL")
    while sockets:
        sockets.pop().close()
    while levels[-1] != "NORMAL":
        await asyncio.sleep(0.05)
    print(*levels)

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
asyncio.run(asyncio.wait_for(main(), 20))
"""


@pytest.mark.medium
def test_a_process_that_runs_out_of_descriptors_notices() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _FEW_DESCRIPTORS], capture_output=True, text=True, check=False
    )
    assert found.stdout == "SHED CRITICAL NORMAL\n", found.stderr
    assert found.stderr.splitlines()[0].startswith("overload: normal -> shed (descriptors ")


def test_the_least_limit_of_a_control_group_or_one_above_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    group = tmp_path / "root" / "a" / "b"
    group.mkdir(parents=True)
    own.write_text("0::/a/b\n")
    machine = memory_limit_bytes(tmp_path / "nowhere", own)
    (group / "memory.max").write_text("max\n")
    assert memory_limit_bytes(tmp_path / "root", own) == machine
    (group.parent / "memory.max").write_text("3000000\n")
    assert memory_limit_bytes(tmp_path / "root", own) == 3_000_000
    (group / "memory.max").write_text("2000000\n")
    assert memory_limit_bytes(tmp_path / "root", own) == 2_000_000
    first = tmp_path / "root" / "memory" / "c"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("1000000\n")
    own.write_text("7:cpu,memory:/c\n3:pids:/x\n")
    assert memory_limit_bytes(tmp_path / "root", own) == 1_000_000


# ------------------------------------------------------------------ what is refused


@asynchronous
async def test_what_is_less_urgent_is_refused_first() -> None:
    admission = Scene().dispatcher.admission

    async def enter(priority: int) -> None:
        async with admission.enter(
            num_prompt_tokens=1, max_tokens=1, timeout_s=60, priority=priority
        ):
            pass

    admission.shed(0)
    for priority in (-5, 0):
        await enter(priority)
    with pytest.raises(OverloadedError, match="urgent requests only") as refused:
        await enter(1)
    assert refused.value.retry_delay_s
    assert admission.state().num_refused == {"overload": 1}
    admission.shed(math.inf)
    await enter(1)


CRITICAL = overloaded(memory=1.0)
SHED = overloaded(memory=0.9)


@pytest.mark.medium
@on_http(overload=CRITICAL)
async def test_over_http_requests_are_refused_unread_and_operators_are_served(
    scene: HttpScene,
) -> None:
    session, url = scene.session, scene.url
    huge = {"Content-Length": "8000000", "Content-Type": "application/json"}
    async with session.post(url + "/v1/completions", headers=huge) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["Connection"] == "close"
        assert "memory 100 %" in await response.text()
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        async with session.get(url + path) as response:
            assert (path, response.status) == (path, 200)
    assert scene.dispatcher.calls == []


@pytest.mark.medium
@on_http(overload=SHED)
async def test_over_http_no_connection_is_kept_open_when_load_is_shed(scene: HttpScene) -> None:
    reply = scene.post()
    scene.say(await scene.command(), 0, "x", last=FinishReason.STOP)
    response = await reply
    assert (response.status, response.headers["Connection"]) == (200, "close")
    await until(lambda: scene.server.connections.open == 0)


@pytest.mark.medium
@asynchronous
async def test_over_grpc_requests_are_refused_unread_and_other_services_are_served() -> None:
    scene, overload = GrpcScene(), overloaded(memory=0.1)
    server = RpcServer(
        [SERVICE],
        lambda one: inference_pb2_grpc.add_InferenceServicer_to_server(scene.service, one),  # type: ignore[no-untyped-call]  # generated
        CallGate(check_load=overload.check),
    )
    scene.address = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        async with AsyncClient(scene.address) as client:
            await client.generate([1, 2], params(2))
            overload.note({"memory": 1.0})
            with pytest.raises(OverloadedError, match="memory 100 %") as refused:
                await client.generate([1, 2], params(2))
            assert refused.value.retry_delay_s
            assert len(scene.dispatcher.calls) == 1
        # Of one whose message has not come yet, too.
        raw = await RawHttp2.connect(scene.address)
        whole = call_frames(1, f"/{SERVICE.full_name}/Generate", b"x" * 100)
        raw.send(whole[: -len(frame(0, payload=b"x" * 105))])
        await until(lambda: 1 in raw.ended)
        assert b"the router is overloaded" in raw.trailers
        raw.send(call_frames(3, "/grpc.health.v1.Health/Check", b""))
        await until(lambda: 3 in raw.ended)
        assert raw.num_data_bytes[3] == 7  # SERVING
        await raw.close()
    finally:
        await server.stop(0)


def metrics_of(overload: Overload) -> Iterator[str]:
    text = RouterMetrics(overload=overload).text().decode()
    return (line for line in text.splitlines() if not line.startswith("#"))


def test_metrics_tell_the_level_and_every_signal() -> None:
    found = set(metrics_of(overloaded(memory=0.9, descriptors=0.25)))
    assert "baton_router_overload_level 1.0" in found
    assert "baton_router_overload_changes_total 1.0" in found
    assert 'baton_router_overload_signal{signal="memory"} 0.9' in found
    assert 'baton_router_overload_signal{signal="descriptors"} 0.25' in found
