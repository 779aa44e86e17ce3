"""Bad input: one clear line that names the field and the limit; no traceback; nothing left."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import Client, SamplingParams
from baton.api.errors import InvalidRequestError, NodeUnavailableError
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from baton.v1 import inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(120)]


def run_baton(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a `baton` command."""
    result = subprocess.run(
        [sys.executable, "-m", "baton", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return result.returncode, result.stderr


def assert_one_error_line(arguments: Sequence[str], *words: str) -> None:
    code, errors = run_baton(*arguments)
    assert code != 0
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    for word in words:
        assert word in lines[0]


@pytest.fixture
def broken_model(tmp_path: Path, demo_model: Path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(demo_model, folder)
    return folder


# ------------------------------------------------------------------ programs


@pytest.mark.parametrize("program", ["router", "prefill", "decode", "up"])
def test_unknown_model_folder(program: str) -> None:
    assert_one_error_line([program, "--model", "./no/such/folder"], "model", "no/such/folder")


def test_model_folder_without_config(tmp_path: Path) -> None:
    assert_one_error_line(["prefill", "--model", str(tmp_path)], "model", "config.json")


def test_truncated_weights(broken_model: Path) -> None:
    weights = broken_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert_one_error_line(["prefill", "--model", str(broken_model)], "model.safetensors")


def test_missing_weights(broken_model: Path) -> None:
    (broken_model / "model.safetensors").unlink()
    assert_one_error_line(["decode", "--model", str(broken_model)], "safetensors")


def test_config_that_is_not_json(broken_model: Path) -> None:
    (broken_model / "config.json").write_text("{", encoding="utf-8")
    assert_one_error_line(["prefill", "--model", str(broken_model)], "config.json")
    assert_one_error_line(["router", "--model", str(broken_model)], "config.json")


def test_tokenizer_that_is_not_json(broken_model: Path) -> None:
    (broken_model / "tokenizer.json").write_text("{", encoding="utf-8")
    assert_one_error_line(["router", "--model", str(broken_model)], "tokenizer.json")


@pytest.mark.parametrize("program", ["router", "prefill"])
def test_port_in_use(program: str, demo_model: Path, deployment: LocalDeployment) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = [program, "--model", str(demo_model), "--listen", address]
        if program == "prefill":
            arguments += ["--router", deployment.config.listen]
        assert_one_error_line(arguments, "listen", address, "in use")


def test_node_whose_router_cannot_be_reached(demo_model: Path) -> None:
    address = free_address()
    assert_one_error_line(
        ["prefill", "--model", str(demo_model), "--router", address, "--join-timeout-s", "1"],
        "router",
        address,
    )


def test_client_whose_router_cannot_be_reached() -> None:
    address = free_address()
    assert_one_error_line(["generate", "hello", "--router", address], "router", address)
    assert_one_error_line(["admin", "nodes", "--router", address], "router", address)


def test_node_with_another_model(broken_model: Path, deployment: LocalDeployment) -> None:
    path = broken_model / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["rms_norm_eps"] = 1e-5
    path.write_text(json.dumps(config), encoding="utf-8")
    arguments = ["prefill", "--model", str(broken_model), "--router", deployment.config.listen]
    assert_one_error_line(arguments, "refused", "model")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--router", "nonsense"),
        ("--listen", "nonsense"),
        ("--kv-cache-memory", "much"),
        ("--memory-utilization", "1.5"),
        ("--memory-utilization", "0.000001"),
        ("--block-size", "-1"),
        ("--dtype", "float8"),
        ("--kv-cache-dtype", "fp4"),
        ("--device", "abacus"),
        ("--attention-backend", "magic"),
        ("--kv-connector", "pigeon"),
        ("--kv-listen", "nonsense"),
        ("--kv-listen", "127.0.0.1:0"),  # with NIXL, which does not listen there
        ("--max-model-len", "1000000"),
        ("--log-level", "loud"),
    ],
)
def test_wrong_node_option(option: str, value: str, demo_model: Path) -> None:
    words = {"--attention-backend": "attention backend", "--kv-connector": "KV connector"}
    assert_one_error_line(
        ["decode", "--model", str(demo_model), option, value], words.get(option, option)
    )


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.1:0"])
def test_an_address_for_kv_that_peers_cannot_dial(listen: str, demo_model: Path) -> None:
    options = ["--kv-connector", "tls", "--kv-listen", listen]
    assert_one_error_line(["decode", "--model", str(demo_model), *options], "--kv-listen: ")


def test_wrong_router_option(demo_model: Path) -> None:
    assert_one_error_line(["router", "--model", str(demo_model), "--policy", "magic"], "policy")
    assert_one_error_line(["router", "--model", str(demo_model), "--listen", "x"], "listen")
    wrong_http = ["--listen", free_address(), "--http-listen", "x"]
    assert_one_error_line(["router", "--model", str(demo_model), *wrong_http], "--http-listen: ")


# ------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    ("prompt", "field", "limit"),
    [
        ("", "prompt", "at least 1"),
        ([], "prompt", "at least 1"),
        ([5] * 2048, "prompt", "2048 tokens > 2047 maximum"),
        ([5, 10_000_000], "prompt", "token ids"),
    ],
)
def test_bad_prompt(
    prompt: str | list[int], field: str, limit: str, deployment: LocalDeployment
) -> None:
    with Client(deployment.config.listen) as client:
        with pytest.raises(InvalidRequestError, match=limit) as caught:
            client.generate(prompt, SamplingParams(max_tokens=4))
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("top_p", -0.1), ("top_p", 1.5),
     ("temperature", float("nan"))],
)  # fmt: skip
def test_bad_parameter_from_any_client(
    field: str, value: float, deployment: LocalDeployment
) -> None:
    """A client that does not check: the router must."""
    request = inference_pb2.GenerateRequest(text="hello")
    setattr(request.sampling_params, field, value)
    with grpc.insecure_channel(deployment.config.listen) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "0"],
        ["--temperature", "-1"],
        ["--top-p", "2"],
        ["--top-k", "-1"],
        ["--min-p", "2"],
        ["--repetition-penalty", "0"],
        ["--stop", ""],
        ["--regex", "([a-z"],
        ["--json-schema", '{"type": "thing"}'],
        ["--json-schema", "no/such/file.json"],
        ["--grammar", "start: nothing"],
        ["--choice", ""],
    ],
)
def test_bad_parameter_on_the_command_line(
    arguments: list[str], deployment: LocalDeployment
) -> None:
    address = deployment.config.listen
    command = ["generate", "hello", "--router", address, *arguments]
    assert_one_error_line(command, f"error: {arguments[0]}: ")


def test_no_prompt_at_all(deployment: LocalDeployment) -> None:
    with grpc.insecure_channel(deployment.config.listen) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(inference_pb2.GenerateRequest()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_router_without_nodes_says_so(demo_model: Path) -> None:
    address = free_address()
    router = subprocess.Popen(
        [sys.executable, "-m", "baton", "router", "--model", str(demo_model), "--listen", address,
         "--http-listen", "", "--join-grace-s", "0.5"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
        with Client(address) as client, pytest.raises(NodeUnavailableError, match="prefill node"):
            client.generate("hello")
    finally:
        router.terminate()
        assert router.wait(15) == 0


def test_everything_still_works_after_all_of_this(deployment: LocalDeployment) -> None:
    with Client(deployment.config.listen) as client:
        assert client.generate("hello", SamplingParams(max_tokens=4)).token_ids
