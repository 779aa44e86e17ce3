"""A router near its memory limit refuses requests, but serves operators."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S


def complete(address: str) -> tuple[int, dict[str, str], str]:
    """Send a request; return status, headers and text of the answer; status 0: no connection."""
    body = json.dumps({"model": str(DEMO_MODEL), "prompt": [1, 2], "max_tokens": 1}).encode()
    request = urllib.request.Request(f"http://{address}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, dict(reply.headers), reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()
    except OSError:
        return 0, {}, ""


@pytest.mark.medium
def test_a_router_above_its_memory_limit_refuses_requests() -> None:
    address = free_address()
    command = [sys.executable, "-m", "baton", "router", "--model", str(DEMO_MODEL)]
    command += ["--listen", free_address(), "--http-listen", address]
    command += ["--memory-limit-mib", "1", "--pair-timeout-s", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        status, headers, text = 0, dict[str, str](), ""
        while status != 429:  # 503 until the router has measured its memory: there are no nodes
            assert time.monotonic() < give_up_at, (status, text)
            assert process.poll() is None
            time.sleep(0.05)
            status, headers, text = complete(address)
        assert "the router is overloaded: memory" in text
        assert int(headers["Retry-After"]) > 0
        with urllib.request.urlopen(f"http://{address}/health", timeout=30) as reply:
            assert reply.status == 200
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert "overload: normal -> critical (memory" in log
