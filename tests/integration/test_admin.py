"""`baton admin` as a person uses it: commands in a terminal, over real processes under load."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.api.errors import RequestCancelledError
from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from baton.deployment.local_deployment import LocalDeployment
from baton.serving.rpc import bearer, open_sync_channel
from baton.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.nixl, pytest.mark.large, pytest.mark.timeout(200)]

TOKEN = "a secret"
PROMPT = "def add(a, b):\n"


class Operator:
    """Somebody at a terminal who knows the token."""

    def __init__(self, router: str) -> None:
        self.environment = {
            **os.environ, "BATON_ROUTER": router, "BATON_ADMIN_TOKEN": TOKEN, "COLUMNS": "100",
        }  # fmt: skip

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "baton", "admin", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**self.environment, **more},
        )  # fmt: skip

    def run(self, *arguments: str, code: int = 0, **more: str) -> str:
        """Run a command; return its output, or standard error if it must fail with ``code``."""
        process = self.start(*arguments, **more)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == code, (arguments, output, errors)
        assert "Traceback" not in errors
        return errors if code else output

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--output", "json"))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """Two decode nodes, and a token."""
    with run_deployment(
        # A node that gets a signal has no time to drain: a removed node has all that it needs.
        "--drain-timeout-s",
        "0",
        num_decode=2,
        router_args=["--policy", "cost"],
        log_folder=tmp_path_factory.mktemp("logs"),
        admin_token=TOKEN,
    ) as running:
        yield running


@pytest.fixture
def operator(deployment: LocalDeployment) -> Operator:
    return Operator(deployment.config.listen)


def complete(router: str, count: int, max_tokens: int = 8) -> list[Completion]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3)

    async def run() -> list[Completion]:
        async with AsyncClient(router, api_key=TOKEN) as client:
            calls = (client.generate(PROMPT, params, timeout_s=90) for _ in range(count))
            return await asyncio.gather(*calls)

    return asyncio.run(run())


def test_every_command_prints_what_it_knows_within_100_columns(
    deployment: LocalDeployment, operator: Operator
) -> None:
    completions = complete(deployment.config.listen, 3)
    request_id = completions[0].request_id
    shown = {
        "nodes": operator.run("nodes"),
        "node d0": operator.run("node", "d0"),
        "stats": operator.run("stats"),
        "requests": operator.run("requests"),
        "requests d0": operator.run("requests", "d0"),
        "trace": operator.run("trace", request_id),
        "explain": operator.run("explain", request_id),
        "explain now": operator.run("explain", "--prompt", PROMPT),
        "audit": operator.run("audit"),
        "policy": operator.run("policy", "get"),
        "top": operator.run("top", "--once", "--interval-s", "0.2"),
        "profile": operator.run("profile", "d0", "--seconds", "0.3"),
        "version": operator.run("version"),
    }
    for name, text in shown.items():
        assert max(map(len, text.splitlines())) <= 100, (name, text)
    assert re.search(r"d0 +decode +serving +0 +0 +0 .*p0: nixl/ucx", shown["nodes"])
    assert re.search(r"3 requests finished in the last 1 min", shown["stats"])
    assert shown["requests"].count("finished") == 3
    assert re.search(r"attempt 1: placed on p0 and d[01]", shown["trace"])
    assert re.search(r"finished \(length\): 8 tokens", shown["trace"])
    assert "by nixl/ucx" in shown["trace"]
    chosen = completions[0].receipt
    assert chosen is not None
    assert re.search(rf"p0 +{chosen.decode_node} ", shown["explain"])
    for name in ("d0", "d1"):
        assert re.search(rf"p0 +{name} ", shown["explain now"])
    assert shown["audit"].count("of them with an owner") == 3
    assert "* cost\n" in shown["policy"]
    assert re.search(r"thread engine of d0: \d+ samples", shown["profile"])
    assert "EngineLoop._run" in shown["profile"]
    assert re.search(r"client +\S+\nrouter +\S+\nd0 ", shown["version"])


def test_programs_read_json_with_raw_units(deployment: LocalDeployment, operator: Operator) -> None:
    [completion] = complete(deployment.config.listen, 1)
    nodes = operator.json("nodes")["nodes"]
    assert [(node["node_name"], node["role"]) for node in nodes] == [
        ("d0", "decode"), ("d1", "decode"), ("p0", "prefill"),
    ]  # fmt: skip
    assert nodes[0]["beat"]["serving_state"] == "serving"
    assert nodes[0]["peers"][0]["bandwidth_bytes_per_s"] > 1e6
    trace = operator.json("trace", completion.request_id)
    assert completion.receipt is not None
    assert trace["receipt"]["ttft_s"] == pytest.approx(completion.receipt.ttft_s)
    assert (trace["state"], trace["attempts"][0]["failed_s"]) == ("finished", None)
    stats = operator.json("stats")
    assert 0 < stats["ttft_s"]["p50"] < 60
    assert operator.json("version")["nodes"].keys() == {"d0", "d1", "p0"}


def test_exit_codes_and_one_line_errors(operator: Operator) -> None:
    wrong = operator.run("nodes", code=1, BATON_ADMIN_TOKEN="wrong")
    assert wrong.startswith("error: authorization: the API key is not known here; ")
    none = operator.run("nodes", code=1, BATON_ADMIN_TOKEN="")
    assert none.startswith("error: authorization: must be 'Bearer' and an API key; commands and ")
    assert "BATON_ADMIN_TOKEN" in none
    nobody = operator.run("nodes", "--router", "127.0.0.1:1", code=1)
    assert nobody == "error: --router: 127.0.0.1:1 cannot be reached (is it up?)\n"
    assert operator.run("policy", "set", code=2).startswith("error: NAME: must be given: ")
    assert "unknown routing policy 'x'" in operator.run("policy", "set", "x", code=2)
    never = "error: there is no node 'd9': none of this name has joined this router"
    assert operator.run("drain", "d9", code=3).startswith(never)
    assert operator.run("trace", "never", code=3).startswith("error: request 'never' is not")
    assert operator.run("abort", "never", code=3) == "error: request 'never' is not open\n"
    assert "log_level: must be one of" in operator.run("log-level", "d0", "loud", code=2)


def test_nodes_are_asked_through_the_router_and_by_nobody_else(
    deployment: LocalDeployment, operator: Operator
) -> None:
    complete(deployment.config.listen, 2)
    [node] = [one for one in operator.json("nodes")["nodes"] if one["node_name"] == "p0"]
    with open_sync_channel(node["address"]) as channel:
        call = channel.unary_unary("/baton.v1.NodeAdmin/FlushCache", bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=5, metadata=bearer(TOKEN))
        assert caught.value.code() in (
            grpc.StatusCode.UNIMPLEMENTED,
            grpc.StatusCode.UNAUTHENTICATED,
        )
    complete(deployment.config.listen, 1, max_tokens=40)
    long = PROMPT * 20
    asyncio.run(_complete_one(deployment.config.listen, long))
    assert _num_cached(operator, long) >= 64
    flushed = {one["node_name"]: one for one in operator.json("flush-cache")["nodes"]}
    assert not any(one["problem"] for one in flushed.values())
    assert sum(one["num_prefixes"] for one in flushed.values()) > 0
    wait_until(lambda: _num_cached(operator, long) == 0, "the router to hear of it")
    assert operator.json("flush-cache", "p0")["nodes"][0]["num_prefixes"] == 0
    assert len(complete(deployment.config.listen, 2)) == 2
    operator.run("audit")


async def _complete_one(router: str, prompt: str) -> None:
    async with AsyncClient(router, api_key=TOKEN) as client:
        await client.generate(prompt, SamplingParams(max_tokens=2))


def _num_cached(operator: Operator, prompt: str) -> int:
    """Tokens of a prompt that the router thinks the node has that would compute it."""
    [decision] = operator.json("explain", "--prompt", prompt)["decisions"]
    assert isinstance(decision["num_cached_tokens"], int)
    return decision["num_cached_tokens"]


def test_names_of_nodes_are_completed(operator: Operator) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from baton.cli.app import main; main()"],
        env={
            **operator.environment, "_BATON_COMPLETE": "complete_bash",
            "COMP_WORDS": "baton admin drain d", "COMP_CWORD": "3",
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.stdout.split() == ["d0", "d1"], result.stderr


def test_top_is_live_in_a_terminal_and_ends_with_ctrl_c(operator: Operator) -> None:
    descriptor, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "baton", "admin", "top", "--interval-s", "0.2"],
        env={**operator.environment, "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    text = ""
    give_up_at = time.monotonic() + 60
    wanted = ("d0", "d1", "p0", "tokens/s")
    while text.count("finished/s") < 4 or not all(name in text for name in wanted):
        assert time.monotonic() < give_up_at, text
        text += os.read(descriptor, 4096).decode(errors="replace")
    assert "\x1b[?1049h" in text  # a screen of its own, so that what was there comes back
    process.send_signal(signal.SIGINT)
    drain = threading.Thread(target=_read_to_its_end, args=(descriptor,))
    drain.start()  # it ends only when all that it says is read
    assert process.wait(30) == 0
    drain.join(30)
    os.close(descriptor)


def _read_to_its_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(descriptor, 4096):
            pass


def test_abort_ends_a_request_for_its_client_and_on_all_nodes(
    deployment: LocalDeployment, operator: Operator
) -> None:

    params = SamplingParams(max_tokens=2000, ignore_eos=True)

    async def run() -> None:
        async with AsyncClient(deployment.config.listen, api_key=TOKEN) as client:
            with pytest.raises(RequestCancelledError, match="an operator ended the request"):
                await read(client)

    async def read(client: AsyncClient) -> None:
        async for delta in client.stream(PROMPT, params):
            if delta.output_index < 20 <= delta.output_index + len(delta.token_ids):
                await asyncio.to_thread(operator.run, "abort", delta.request_id)

    asyncio.run(run())
    give_up_at = time.monotonic() + 20
    while any(operator.json("requests", name)["requests"] for name in ("p0", "d0", "d1")):
        assert time.monotonic() < give_up_at
    assert operator.json("requests")["requests"][0]["error_code"] == "CANCELLED"


def test_a_node_that_stood_still_is_asked_once_it_has_joined_again(
    deployment: LocalDeployment, operator: Operator
) -> None:
    process, asked = deployment.child("d0").process, admin_pb2.NodeRequest(node="d0")
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: operator.json("node", "d0").get("lost"), "the loss of d0")
        with open_sync_channel(deployment.config.listen) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            metadata = bearer(deployment.admin_token)
            found = admin.ListNodeRequests.future(asked, timeout=20, metadata=metadata)
            # The answer shows that the router has got the first call, too
            assert admin.GetNode(asked, timeout=20, metadata=metadata).lost
            process.send_signal(signal.SIGCONT)
            assert found.result().num_blocks
    finally:
        process.send_signal(signal.SIGCONT)


def test_drain_under_load_loses_nothing_then_resume_serves_and_remove_ends_the_process(
    deployment: LocalDeployment, operator: Operator
) -> None:
    router = deployment.config.listen
    params = SamplingParams(max_tokens=80, ignore_eos=True, seed=3)

    async def under_load(*arguments: str) -> list[str]:
        """Requests one after the other, a command in the midst of them; who decoded each."""
        async with AsyncClient(router, api_key=TOKEN) as client:
            calls: list[asyncio.Task[Completion]] = []

            async def begin(count: int) -> None:
                for _ in range(count):
                    calls.append(asyncio.create_task(client.generate(PROMPT, params, timeout_s=90)))
                    await asyncio.sleep(0.15)

            await begin(8)
            command = asyncio.create_task(asyncio.to_thread(operator.run, *arguments))
            while not command.done():
                await begin(1)
            await command
            await begin(8)
            completions = await asyncio.gather(*calls)
        assert {completion.token_ids for completion in completions} == {expected}
        receipts = [one.receipt for one in completions if one.receipt is not None]
        assert len(receipts) == len(calls)
        assert {receipt.num_attempts for receipt in receipts} == {1}
        return [receipt.decode_node for receipt in receipts]

    [alone] = complete(router, 1, params.max_tokens)
    expected = alone.token_ids
    operator.run("policy", "set", "round_robin")
    both = {"d0", "d1"}
    drained = asyncio.run(under_load("drain", "d0", "--wait"))
    assert (set(drained[:8]), set(drained[-8:])) == (both, {"d1"})
    assert operator.json("node", "d0")["beat"]["serving_state"] == "drained"
    assert "d0: 0 of" in operator.run("audit")
    resumed = asyncio.run(under_load("resume", "d0", "--wait"))
    assert (set(resumed[:4]), set(resumed[-8:])) == ({"d1"}, both)
    removed = asyncio.run(under_load("remove", "d0", "--wait"))
    assert (set(removed[:8]), set(removed[-8:])) == (both, {"d1"})
    assert deployment.child("d0").process.wait(20) == 0
    why = "error: there is no node 'd0': it left after its drain"
    assert operator.run("node", "d0", code=3).startswith(why)
    # The last decode node is busy for longer than somebody wants to wait.
    busy = asyncio.run(_drain_for_too_short_a_time(router, operator))
    assert busy.startswith("error: d1 is still draining after --timeout-s: d1 is draining: 1")
    operator.run("remove", "d1", "--force")
    why = "error: there is no node 'd1': it was removed by an operator"
    assert operator.run("node", "d1", code=3).startswith(why)
    assert deployment.child("d1").process.wait(20) == 0
    log = Path(deployment.child("router").log).read_text(encoding="utf-8")
    for what in ("drain d0", "resume d0", "remove d0", "remove d1 by force"):
        assert re.search(rf"admin 127\.0\.0\.1:?\d* \S+: {what}\n", log), what


async def _drain_for_too_short_a_time(router: str, operator: Operator) -> str:
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    async with AsyncClient(router, api_key=TOKEN) as client:
        call = asyncio.create_task(client.generate(PROMPT, params))
        await asyncio.sleep(0.5)
        command = ("drain", "d1", "--wait", "--timeout-s", "0.6")
        said = await asyncio.to_thread(lambda: operator.run(*command, code=4))
        assert not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    return said
