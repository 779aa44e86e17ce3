"""Tests of ranks with other launchers: torchrun, plain processes as with SLURM, and a real Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton import Client, SamplingParams
from baton.api.errors import ConfigError
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import deployment_config

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]

PROGRAM = """
import sys
from baton import LLM, SamplingParams
llm = LLM({model!r}, executor={executor!r}, tensor_parallel_size={tensor}, num_threads=1,
          pipeline_parallel_size={stages}, kv_cache_bytes=2**22, device="cpu")
out = llm.generate(["One day a little"], SamplingParams(max_tokens=12, temperature=0))
print("TOKENS", list(out[0].token_ids), flush=True)
if "stay" in sys.argv:
    sys.stdin.read()
    llm.generate(["One day a little"], SamplingParams(max_tokens=12, temperature=0))
llm.engine.close()
"""


@pytest.fixture(scope="module")
def tokens() -> str:
    done = subprocess.run(
        [sys.executable, "-c", program("uniproc", 1, 1)], capture_output=True, text=True, check=True
    )
    return found(done.stdout)


def program(executor: str, tensor: int, stages: int) -> str:
    return PROGRAM.format(model=str(DEMO_MODEL), executor=executor, tensor=tensor, stages=stages)


def found(output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith("TOKENS"))
    return line


def free_port() -> str:
    return free_address().rpartition(":")[2]


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
def test_torchrun_starts_ranks_and_one_of_them_leads(
    shape: tuple[int, int], tokens: str, tmp_path: Path
) -> None:
    file = tmp_path / "generate.py"
    file.write_text(program("external_launcher", *shape), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", free_port(), str(file)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert found(done.stdout) == tokens  # and nobody else says anything


@pytest.fixture
def as_slurm_starts() -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, of which the first leads and waits to be told to go on."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program("external_launcher", 2, 1), "stay"],
            env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2",
                 "MASTER_ADDR": "localhost", "MASTER_PORT": port},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_fails_when_a_rank_far_away_is_gone(
    as_slurm_starts: list[subprocess.Popen[str]], how: signal.Signals, tokens: str
) -> None:
    leader, other = as_slurm_starts
    assert leader.stdout is not None
    assert leader.stdout.readline().strip() == tokens
    other.send_signal(how)
    assert other.wait(10) == -signal.SIGKILL  # a stopped rank is ended where it is
    time.sleep(0.5)
    _, errors = leader.communicate("", timeout=60)
    assert leader.returncode != 0
    said = "was stopped" if how == signal.SIGSTOP else ""
    assert re.search(f"EngineDeadError: rank 1 .*{said}", errors)


def test_ranks_end_when_the_engine_is_killed(as_slurm_starts: list[subprocess.Popen[str]]) -> None:
    leader, other = as_slurm_starts
    assert leader.stdout is not None
    assert leader.stdout.readline()
    leader.kill()
    other.wait(10)


def test_a_launcher_of_another_size_is_refused() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program("external_launcher", 2, 1)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "makes 2 ranks, but the launcher has started 3" in done.stderr


def rays() -> set[psutil.Process]:
    """Ray's processes below this one; tests of executors may have left it theirs, for the next."""
    mine = psutil.Process().children(recursive=True)
    return {one for one in mine if "ray" in one.name()}


@pytest.mark.lengthy
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
def test_ray_places_ranks_as_actors(shape: tuple[int, int], tokens: str) -> None:
    pytest.importorskip("ray")
    before = rays()
    done = subprocess.run(
        [sys.executable, "-c", program("ray", *shape)],
        env={**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert found(done.stdout) == tokens
    assert not rays() - before


@pytest.mark.lengthy
def test_ray_places_nodes_and_their_ranks(tokens: str) -> None:
    pytest.importorskip("ray")
    before = rays()
    config = deployment_config(
        "--executor", "ray", "--kv-cache-memory", "32M",
        prefill_args=["--tensor-parallel-size", "2"], ray_address="",
    )  # fmt: skip
    with LocalDeployment(config) as running:
        running.wait_ready(200)
        nodes = [running.child(name).process for name in ("p0", "d0")]
        assert all(psutil.Process(one.pid).parent() != psutil.Process() for one in nodes)
        with Client(config.listen) as client:
            answer = client.generate(
                "One day a little", SamplingParams(max_tokens=12, temperature=0)
            )
        assert f"TOKENS {list(answer.token_ids)}" == tokens
        processes = [psutil.Process(one.pid) for one in nodes]
        nodes[0].kill()
        assert nodes[0].wait(30) == -signal.SIGKILL
        with pytest.raises(ConfigError, match="p0 ended"):
            running.check()
    psutil.wait_procs(processes, 30)
    assert not [one for one in processes if one.is_running()]
    assert not rays() - before
