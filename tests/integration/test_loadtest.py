"""`baton loadtest` with real processes: its page's commands, its files and its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.processes.free_address import free_address
from loadtest.load.generate import Lengths, Workload, gamma_arrivals, generate
from loadtest.load.traces import write_trace
from tests.fakes.outside.load_servers import scripted_grpc
from tests.fakes.outside.load_targets import even
from tests.fakes.processes.deployments import wait_for_answer

pytestmark = pytest.mark.large

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "loadtest.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)[1:]
    for line in re.findall(r"^baton (?:router|sim-node|loadtest).*", PAGE, re.M)
]
KEY = "key-of-nobody"
# This machine may be busy; whether the generator keeps up is not what is tested here.
ANY_LAG = ("--max-lag-ms", "60000")


def baton(*arguments: str, cwd: Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "BATON_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """The page's router and nodes; where they are instead of where the page has them."""
    moved = {"127.0.0.1:50051": free_address(), "127.0.0.1:8000": free_address()}
    processes = [
        subprocess.Popen([sys.executable, "-m", "baton", *at(moved, command)], cwd=ROOT)
        for command in COMMANDS[:2]
    ]
    try:
        wait_for_answer(moved["127.0.0.1:50051"])
        yield moved
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=20) for process in processes] == [0, 0]


def at(moved: dict[str, str], command: list[str]) -> list[str]:
    for before, after in moved.items():
        command = [word.replace(before, after) for word in command]
    return command


@pytest.mark.timeout(500)
def test_the_commands_of_the_page_work(addresses: dict[str, str], tmp_path: Path) -> None:
    assert [command[0] for command in COMMANDS] == ["router", "sim-node", *["loadtest"] * 11]
    short = Workload(turn_tokens=Lengths(50, 0.5), output_tokens=Lengths(10, 0.5), mean_turns=2.0)
    starts = gamma_arrivals(random.Random(0), rate_per_s=10.0, variation=1.0)
    write_trace(tmp_path / "trace.jsonl", generate(short, starts, num_sessions=20, seed=0))
    prompts = ({"prompt": f"Once upon a time, {number}", "output_tokens": 5} for number in range(9))
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    for command in COMMANDS[2:-1]:  # the last one has a test of its own
        if command[1] == "tune":  # searches for an hour; test_tuning.py has a short search
            continue
        moved = addresses | {"examples/demo_model": str(ROOT / "examples" / "demo_model")}
        done = baton(*at(moved, command), *ANY_LAG, cwd=tmp_path, timeout_s=200)
        assert done.returncode == 0, done.stderr
        has_faults = "--fault" in command
        # One load has a report; several loads or deployments have a table.
        has_table = "goodput/s" in done.stdout or "in SLO" in done.stdout
        assert ("tokens: 0 of" in done.stdout) != has_table
        assert "failed" not in done.stdout or has_faults or "--find-max-goodput" in command
        # A warning is one line, however long; the terminal breaks it.
        lines = [line for line in done.stdout.splitlines() if not line.startswith("warning: ")]
        assert max(map(len, lines)) <= (200 if has_faults else 100)
    assert_files_are_true(tmp_path / "result.json", tmp_path / "requests.jsonl")
    page = (tmp_path / "result.html").read_text(encoding="utf-8")
    [embedded] = re.findall(r'id="result">(.*?)</script>', page, re.DOTALL)
    assert json.loads(embedded) == json.loads((tmp_path / "result.json").read_text())


def assert_files_are_true(result_path: Path, rows_path: Path) -> None:
    result = json.loads(result_path.read_text())
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    summary = result["summary"]
    assert KEY not in result_path.read_text()
    assert result["plan"]["load"] == {
        "kind": "OpenLoop", "rate_per_s": 10.0, "arrivals": "gamma", "burstiness": 3.0,
    }  # fmt: skip
    assert {"python", "num_cpus", "load_average", "baton"} <= set(result["environment"])
    outcomes = [row["outcome"] for row in rows]
    assert summary["num_requests"] == len(rows) > 5
    assert summary["num_cancelled"] == outcomes.count("cancelled")
    assert summary["num_ok"] == outcomes.count("ok") == summary["tokens"]["num_checked"]
    assert summary["tokens"]["num_miscounted"] == summary["tokens"]["num_short"] == 0
    assert summary["cache"]["num_cached_tokens"] > 0
    ok = [row for row in rows if row["outcome"] == "ok"]
    assert all(sum(row["frame_tokens"]) == row["server_output_tokens"] for row in ok)
    assert all(row["server_prompt_tokens"] == row["num_prompt_tokens"] for row in ok)
    assert all(row["receipt"]["ttft_s"] > 0 for row in ok)
    slowest = max(row["frame_times_s"][0] - row["scheduled_s"] for row in rows)
    assert summary["latencies"]["ttft_s"]["max"] == pytest.approx(slowest, abs=1e-5)


def test_no_run_measures_what_another_has_left_in_the_cache(
    addresses: dict[str, str], tmp_path: Path
) -> None:
    """Two runs of one command draw fresh prompts, unless a seed asks for the first run's."""
    command = ["loadtest", "run", "--target", f"grpc://{addresses['127.0.0.1:50051']}", *ANY_LAG,
               "--concurrency", "2", "--num-requests", "6", "--input-tokens", "300",
               "--output-tokens", "2"]  # fmt: skip
    path = tmp_path / "result.json"

    def cached(*options: str) -> tuple[float, str]:
        done = baton(*command, "--json", str(path), *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text())["summary"]["cache"]["cached_share"], done.stdout

    first, _ = cached()
    second, shown = cached()
    assert (first, second) == (0, 0)
    assert "prompt tokens cached: 0.0%" in shown
    seed = json.loads(path.read_text())["plan"]["seed"]
    third, shown = cached("--seed", str(seed))
    assert third > 0.5
    assert "warning: " in shown
    assert "the server has met these prompts before" in shown


@pytest.mark.parametrize("is_chat", [False, True])
def test_tokens_are_counted_over_http(
    addresses: dict[str, str], tmp_path: Path, is_chat: bool
) -> None:
    """Each frame's, by the usage after each step; and of a conversation the history is cached."""
    turns = [{"text": "Once upon a time there was a king. " * 5}, {"text": "And then?"}]
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": turns}))
    prompts = ["--dataset", str(path)] if is_chat else ["--turns", "2", "--input-tokens", "100"]
    done = baton(
        *("loadtest", "run", "--target", f"http://{addresses['127.0.0.1:8000']}/v1", *ANY_LAG),
        *("--concurrency", "1", "--num-requests", "4", "--output-tokens", "5", *prompts),
        *("--json", "result.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "ITL is estimated" not in done.stdout
    summary = json.loads((tmp_path / "result.json").read_text())["summary"]
    assert summary["tokens"] == {
        "num_checked": 4, "num_miscounted": 0, "num_estimated": 0, "num_short": 0,
    }  # fmt: skip
    assert summary["latencies"]["itl_s"]["count"] == 4 * 4
    assert 0 < summary["cache"]["cached_share"] <= summary["cache"]["shared_share"] + 0.1


def test_a_generator_that_is_late_fails_the_run(addresses: dict[str, str], tmp_path: Path) -> None:
    options = ["--rate", "20", "--num-requests", "10", "--output-tokens", "3"]
    target = f"grpc://{addresses['127.0.0.1:50051']}"
    done = baton("loadtest", "run", "--target", target, *options,
                 "--max-lag-ms", "0.0001", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 3
    assert "the generator did not keep up" in done.stderr
    assert "10 ok" in done.stdout


def test_requests_that_all_fail_are_counted_by_kind(
    addresses: dict[str, str], tmp_path: Path
) -> None:
    options = ["--rate", "50", "--num-requests", "10", "--vocab-size", "1000000000"]
    target = f"grpc://{addresses['127.0.0.1:50051']}"
    done = baton("loadtest", "run", "--target", target, *options, *ANY_LAG, cwd=tmp_path)
    assert done.returncode == 1
    assert "10 x INVALID_ARGUMENT: " in done.stdout
    assert done.stderr == "error: no request of the measured window succeeded\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--target", "grpc://127.0.0.1:1"], "exactly one of them must be given"),
        (["--target", "grpc://127.0.0.1:1", "--rate", "1"], "one of them must be given"),
        (["--target", "x", "--rate", "1", "--num-requests", "1"], "target: must be SCHEME"),
        (
            ["--target", "grpc://127.0.0.1:1", "--rate", "1", "--num-requests", "1"],
            "127.0.0.1:1 does not answer",
        ),
        (
            ["--target", "x", "--rate", "1", "--num-requests", "1", "--json", "no/such/folder"],
            "json: no/such/folder cannot be written",
        ),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], problem: Any, tmp_path: Path) -> None:
    done = baton("loadtest", "run", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_stopped_run_reports_what_there_is(tmp_path: Path) -> None:
    async def scene() -> None:
        async with scripted_grpc(even(0.01, 0.01)) as (serving, url):
            options = ["--target", url, "--rate", "50", "--duration-s", "100", *ANY_LAG]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "baton", "loadtest", "run", *options, "--output-tokens", "3",
                cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            while len(serving.calls) < 20:
                assert process.returncode is None
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            shown, problems = await process.communicate()
            assert process.returncode == 130
            assert "tokens: 0 of" in shown.decode()
            assert problems.decode() == "error: the run was stopped before its end\n"

    asyncio.run(asyncio.wait_for(scene(), 60))
