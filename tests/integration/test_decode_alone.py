"""Tests of a router with only decode nodes: the tokens of one process, and no block left held."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from baton import SamplingParams
from baton.v1 import admin_pb2, admin_pb2_grpc
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.foreign_model import make_foreign_model
from tests.fakes.processes.deployments import READY_TIMEOUT_S, complete_all, run_deployment

pytestmark = [pytest.mark.thorough, pytest.mark.nixl, pytest.mark.timeout(400)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=7)


def test_a_decode_node_without_prefill_nodes_equals_one_process(tmp_path: Path) -> None:
    """Beside a node with other weights, which would take half of them."""
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1)
    assert llm.tokenizer is not None
    text = llm.tokenizer.encode(GREEDY.__class__.__doc__ or "")
    prompts = [(text * 20)[7 * index : 7 * index + 1 + 43 * index] for index in range(16)]
    params = [GREEDY if index % 2 else SAMPLED for index in range(len(prompts))]
    chunks = ["--long-prefill-token-threshold", "256"]
    with (
        run_deployment(*chunks, num_prefill=0, local_prefill=True) as running,
        foreign_node(running.config.listen, tmp_path) as foreign,
    ):
        split = complete_all(running, prompts, params)
        assert (foreign().health, foreign().num_requests) == ("not serving", 0)
        assert "weights differs: it has " in foreign().health_why
    for prompt, one, completion in zip(prompts, params, split, strict=True):
        [alone] = llm.generate([prompt], one)
        assert completion.token_ids == alone.token_ids
        assert completion.finish_reason == alone.finish_reason
        receipt = completion.receipt
        assert receipt is not None
        assert receipt.decode_node == "d0"
        assert (receipt.prefill_node, receipt.prefill) == ("", None)
        assert receipt.decode is not None
        computed = receipt.decode.num_prompt_tokens_computed
        assert computed + receipt.decode.num_cached_tokens == len(prompt)
        assert receipt.decode.push.num_blocks == 0


@contextlib.contextmanager
def foreign_node(router: str, folder: Path) -> Iterator[Callable[[], admin_pb2.NodeDescription]]:
    """A decode node that only its weights tell from d0; gives what the router says of it."""
    arguments = ["decode", "--model", str(make_foreign_model(DEMO_MODEL, folder))]
    arguments += ["--router", router, "--name", "foreign", "--dtype", "float32"]
    with grpc.insecure_channel(router) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated

        def describe() -> admin_pb2.NodeDescription:
            request = admin_pb2.NodeRequest(node="foreign")
            found: admin_pb2.NodeDescription = stub.GetNode(request, timeout=10)
            return found

        with subprocess.Popen([sys.executable, "-m", "baton", *arguments]) as process:
            try:
                give_up_at = time.monotonic() + READY_TIMEOUT_S
                while True:
                    with contextlib.suppress(grpc.RpcError):
                        describe()
                        break
                    assert time.monotonic() < give_up_at
                    time.sleep(0.1)
                yield describe
            finally:
                process.kill()
