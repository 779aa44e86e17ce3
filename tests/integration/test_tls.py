"""mTLS on all that a split system listens on and dials: real processes, real certificates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest

from baton import AsyncClient, Client, SamplingParams
from baton.access.dev_certificates import LOCAL_HOSTS, Holder, write_dev_certificates
from baton.access.tls import TlsOptions, client_context, read_material
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from baton.wire import types as wire_types
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.network.certificates import Authority, replace
from tests.fakes.processes.deployments import READY_TIMEOUT_S, deployment_config

pytestmark = [pytest.mark.nixl, pytest.mark.large, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PROMPT = "def add(a, b):\n"
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
D0 = "certificate: is for spiffe://baton/node/decode/d0"
HOLDERS = (
    Holder(name="router", hosts=LOCAL_HOSTS),
    Holder(name="p0", uri_paths=("node/prefill/p0",), hosts=LOCAL_HOSTS),
    Holder(name="d0", uri_paths=("node/decode/d0",), hosts=LOCAL_HOSTS),
    Holder(name="client", uri_paths=("infer/client",)),
    Holder(name="operator", uri_paths=("look-operate/operator",)),
)


class System:
    """A deployment with a certificate for everybody, and its addresses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_dev_certificates(folder, HOLDERS, days=1)
        self.config = deployment_config(
            "--metrics-listen",
            "127.0.0.1:0",
            http=True,
            router_args=["--served-model-name", "demo"],
            tls_folder=folder,
            log_folder=folder / "logs",
        )

    def tls(self, name: str) -> TlsOptions:
        return self.config.tls_of(name)

    def arguments(self, name: str) -> list[str]:
        own = self.tls(name)
        return ["--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.ca]

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()


def baton(*arguments: str, code: int = 0) -> str:
    """Run a command; return both of its streams in one text, as a terminal shows them."""
    done = subprocess.run(
        [sys.executable, "-m", "baton", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "COLUMNS": "200"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("certificates"))
    with LocalDeployment(system.config) as deployment:
        deployment.wait_ready(READY_TIMEOUT_S)
        yield system


# ---------------------------------------------------------------- who gets in


def test_the_python_client_and_plain_stubs_get_the_same_tokens(system: System) -> None:
    with Client(system.config.listen, tls=system.tls("client")) as client:
        ours = client.generate(PROMPT, GREEDY).token_ids
        prompt = client.tokenize(PROMPT)
    assert len(ours) == 16
    material = read_material(system.tls("client"))
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.chain)
    with grpc.secure_channel(system.config.listen, credentials) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        request = inference_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=prompt),
            sampling_params=wire_types.sampling_params_to_proto(GREEDY),
        )
        theirs = [token for response in stub.Generate(request) for token in response.token_ids]
    assert tuple(theirs) == tuple(ours)


def test_the_openai_client_over_https(system: System) -> None:
    http = openai.DefaultHttpxClient(verify=client_context(read_material(system.tls("client"))))
    with openai.OpenAI(
        base_url=f"https://{system.config.http_listen}/v1",
        api_key="none",
        http_client=http,
        max_retries=0,
    ) as client:
        assert [model.id for model in client.models.list().data] == ["demo"]
        text = client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, temperature=0)
        stream = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=16, temperature=0, stream=True
        )
        assert "".join(event.choices[0].text for event in stream) == text.choices[0].text != ""


def test_commands_and_the_load_test(system: System, tmp_path: Path) -> None:
    router = ["--router", system.config.listen]
    said = baton("generate", PROMPT, *router, *system.arguments("client"), "--max-tokens", "4")
    assert "4 tokens" in said
    nodes = baton("admin", "nodes", *router, *system.arguments("operator"), "--output", "json")
    assert {node["node_name"] for node in json.loads(nodes)["nodes"]} == {"p0", "d0"}
    audit = baton("admin", "audit", *router, *system.arguments("operator"), "--output", "json")
    assert not any(node.get("problem") for node in json.loads(audit)["nodes"])
    for target in (
        f"grpc://{system.config.listen}",
        f"https://{system.config.http_listen}/v1",
    ):
        result = tmp_path / "result.json"
        baton(
            "loadtest", "run", "--target", target, "--concurrency", "1", "--num-requests", "3",
            "--input-tokens", "8", "--output-tokens", "4", "--max-lag-ms", "60000",
            "--json", str(result), *system.arguments("client"),
        )  # fmt: skip
        assert json.loads(result.read_text())["summary"]["num_ok"] == 3


def test_a_nodes_own_server_and_its_metrics_want_a_certificate(system: System) -> None:
    nodes = baton(
        "admin", "nodes", "--router", system.config.listen, *system.arguments("operator"),
        "--output", "json",
    )  # fmt: skip
    [address] = [n["address"] for n in json.loads(nodes)["nodes"] if n["node_name"] == "d0"]
    page = re.search(r"metrics at (https://\S+)", system.log("d0"))
    assert page is not None

    async def ask(options: TlsOptions, url: str) -> tuple[int, str]:
        context = client_context(read_material(options))
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, ssl=context) as response,
        ):
            return response.status, await response.text()

    assert "baton_" in asyncio.run(ask(system.tls("operator"), page[1]))[1]
    nobody = TlsOptions(ca=system.tls("client").ca)
    status, text = asyncio.run(ask(nobody, page[1]))
    assert (status, "baton_" in text) == (401, False)
    ready_url = page[1].replace("/metrics", "/ready")
    assert asyncio.run(ask(nobody, ready_url)) == (200, "ready\n")
    for options, ready in ((system.tls("router"), True), (nobody, False)):
        material = read_material(options)
        credentials = grpc.ssl_channel_credentials(
            material.ca, material.key or None, material.chain or None
        )
        with grpc.secure_channel(address, credentials) as channel:
            future = grpc.channel_ready_future(channel)
            if ready:
                future.result(timeout=10)
            else:
                with pytest.raises(grpc.FutureTimeoutError):
                    future.result(timeout=1)
            future.cancel()


# ---------------------------------------------------------------- who does not


def test_each_refusal_is_one_line_in_the_terminal(system: System, tmp_path: Path) -> None:
    stranger = Authority(tmp_path)
    eve = stranger.issue("eve", "look-operate/operator")
    ca = system.tls("client").ca
    router = ["--router", system.config.listen]
    cannot = f"error: the router at {system.config.listen} cannot be reached: "
    cases = [
        ([], f"{cannot}it speaks TLS, and --tls-ca (or BATON_TLS_CA) is not given"),
        (["--tls-ca", ca], f"{cannot}it wants a client certificate (--tls-cert, --tls-key)"),
        (
            ["--tls-ca", eve.ca, "--tls-cert", eve.cert, "--tls-key", eve.key],
            f"{cannot}its certificate is of no CA in {eve.ca} (unable to get local issuer "
            "certificate)",
        ),
        (
            ["--tls-ca", ca, "--tls-cert", eve.cert, "--tls-key", eve.key],
            f"{cannot}it hangs up on our certificate {eve.cert}; does it trust the CA of that?",
        ),
        (
            ["--tls-ca", ca, "--tls-cert", eve.cert, "--tls-key", system.tls("client").key],
            f"error: --tls-key: {system.tls('client').key} is not the key of the certificate in "
            f"{eve.cert}",
        ),
    ]
    for arguments, line in cases:
        assert baton("generate", "x", *router, *arguments, code=1) == f"{line}\n"
    said = baton("admin", "nodes", *router, "--tls-ca", ca, code=1)
    assert said == (
        f"error: --router: {system.config.listen} cannot be reached (it wants a client certificate "
        "(--tls-cert, --tls-key))\n"
    )


@pytest.mark.parametrize(
    ("command", "name", "certificate", "problem"),
    [
        ("decode", "d1", "d0", f"{D0}, not for node/decode/d1"),
        ("prefill", "d0", "d0", f"{D0}, not for node/prefill/d0"),
        ("decode", "d0", "client", "authorization: client must have the role join for this"),
    ],
)
def test_a_node_joins_as_what_its_certificate_says_only(
    system: System, command: str, name: str, certificate: str, problem: str
) -> None:
    said = baton(
        command, "--model", str(DEMO_MODEL), "--name", name, "--router", system.config.listen,
        "--log-level", "warning", *system.arguments(certificate), code=1,
    )  # fmt: skip
    assert said == f"error: the router refused this node: {problem}\n"
    with Client(system.config.listen, tls=system.tls("client")) as client:  # nobody was hurt
        assert len(client.generate(PROMPT, GREEDY).token_ids) == 16


def test_a_node_of_another_ca_says_why_and_how_long_it_tried(
    system: System, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    own = stranger.issue("d1", "node/decode/d1")
    said = baton(
        "decode", "--model", str(DEMO_MODEL), "--name", "d1", "--router", system.config.listen,
        "--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", system.tls("client").ca,
        "--log-level", "warning", "--join-timeout-s", "3", code=1,
    )  # fmt: skip
    why = f"it hangs up on our certificate {own.cert}; does it trust the CA of that?"
    warning, error = said.splitlines()  # and not one for each try
    assert warning.endswith(f"router {system.config.listen} is tried again: {why}")
    assert error == (
        f"error: --router: {system.config.listen} cannot be reached (tried for 3 s): {why}"
    )


def test_https_logs_who_fails_once_and_not_each_time(system: System) -> None:
    host, port = system.config.http_listen.split(":")
    context = ssl.create_default_context(cafile=system.tls("client").ca)

    async def fail() -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            await reader.read()
            writer.close()

    async def fail_often() -> None:
        for _ in range(20):
            await fail()

    asyncio.run(fail_often())
    lines = [line for line in system.log("router").splitlines() if "TLS handshake failed" in line]
    assert len(lines) == 1
    assert "127.0.0.1: a TLS handshake failed: " in lines[0]


# ---------------------------------------------------------------- rotation; ends with another CA


def test_a_new_ca_takes_over_under_traffic_and_the_old_one_gets_nobody_in(
    system: System, tmp_path: Path
) -> None:
    folder, new = system.folder, tmp_path / "new"
    write_dev_certificates(new, HOLDERS, days=1)
    old = {suffix: (folder / f"client.{suffix}").read_bytes() for suffix in ("crt", "key")}
    old_ca, new_ca = ((one / "ca.crt").read_bytes() for one in (folder, new))

    async def rotate() -> int:
        num_done = 0
        stopping = asyncio.Event()

        async def generate(client: AsyncClient) -> None:
            nonlocal num_done
            completion = await client.generate(PROMPT, GREEDY)
            assert len(completion.token_ids) == 16
            num_done += 1

        async def keep_on(client: AsyncClient) -> None:
            while not stopping.is_set():
                await generate(client)

        async def come_anew() -> None:
            while not stopping.is_set():
                async with AsyncClient(system.config.listen, tls=system.tls("client")) as client:
                    await generate(client)

        async with (
            AsyncClient(system.config.listen, tls=system.tls("client")) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(keep_on(client))
            group.create_task(come_anew())
            await asyncio.sleep(1)
            replace(folder / "ca.crt", old_ca + new_ca)
            await asyncio.sleep(2)
            for holder in HOLDERS:
                for suffix in ("key", "crt"):
                    name = f"{holder.name}.{suffix}"
                    replace(folder / name, (new / name).read_bytes())
            await asyncio.sleep(2)
            replace(folder / "ca.crt", new_ca)
            await asyncio.sleep(2)
            stopping.set()
        return num_done

    assert asyncio.run(rotate()) > 10
    assert "read new certificates: " in system.log("router")
    for suffix, data in old.items():
        replace(tmp_path / f"old.{suffix}", data)
    said = baton(
        "generate", "x", "--router", system.config.listen, "--tls-ca", str(folder / "ca.crt"),
        "--tls-cert", str(tmp_path / "old.crt"), "--tls-key", str(tmp_path / "old.key"), code=1,
    )  # fmt: skip
    assert "it hangs up on our certificate" in said


def test_after_it_nodes_join_again_with_their_new_certificates(
    tmp_path: Path,
) -> None:
    """A router that comes back shows the new certificate, and its nodes show theirs."""
    system = System(tmp_path / "first")
    write_dev_certificates(tmp_path / "second", HOLDERS, days=1)
    with LocalDeployment(system.config) as deployment:
        deployment.wait_ready(READY_TIMEOUT_S)
        for path in (tmp_path / "second").iterdir():
            replace(system.folder / path.name, path.read_bytes())
        deployment.restart("router")

        def joined() -> bool:
            material = read_material(system.tls("operator"))
            credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.chain)
            with grpc.secure_channel(system.config.listen, credentials) as channel:
                stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
                with contextlib.suppress(grpc.RpcError):
                    response: Any = stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=2)
                    return len(response.nodes) == 2
            return False

        give_up_at = time.monotonic() + 60
        while not joined():
            assert time.monotonic() < give_up_at
            time.sleep(0.1)
        with Client(system.config.listen, tls=system.tls("client")) as client:
            assert len(client.generate(PROMPT, GREEDY).token_ids) == 16


# ---------------------------------------------------------------- the page's own commands


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    commands = [line for block in blocks for line in block.splitlines() if "certs/" in line]
    [up] = re.findall(r"^baton up .*--tls-folder certs$", page, re.M)
    listen, http_listen = free_address(), free_address()

    def words(line: str) -> list[str]:
        moved = line.replace("127.0.0.1:8000", http_listen)
        found = shlex.split(moved.replace("examples/demo_model", str(DEMO_MODEL)))
        return [sys.executable, "-m", *found] if found[0] == "baton" else found

    def run(line: str, *more: str) -> str:
        done = subprocess.run(
            [*words(line), *more], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    run("baton certs dev --out certs")
    own = ["--listen", listen, "--http-listen", http_listen]
    process = subprocess.Popen(
        [*words(up), *own], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = iter(process.stdout.readline, "")
        assert any(line.startswith("ready  baton generate") for line in said)
        for line in commands:
            output = run(line, *(["--router", listen] if line.startswith("baton") else []))
            assert output.strip(), line
        assert len(commands) == 3
    finally:
        process.terminate()
        process.communicate(timeout=30)
