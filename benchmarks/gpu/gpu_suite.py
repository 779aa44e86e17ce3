"""Check tokens and measure steps on a GPU: everything that needs a GPU, in ten minutes.

    engine     the engine on the device gives the same tokens as on the CPU, in float32
    graphs     replayed steps that run ahead give the same tokens as eager steps one by one
    decode     decode steps of Qwen3-0.6B and 8B shapes, context 1k: time, floor, idle share
    push       600 MB of KV over NIXL between two processes, and a copy on the device
    split      prefill and decode processes on the device, KV in its memory, NIXL: same tokens
    nano       nano-vllm's workload on Qwen3-0.6B's shape: tokens per second
    kernels    small Triton kernels compared with copies and torch's ops (kernels_gpu.py)
    attention  Triton's paged attention compared with the best library (attention_gpu.py)
    products   4- and 8-bit weights compared with the vendor's bfloat16 (quantized_gpu.py)
    few bits   decode steps of the 8B shape with 4- and 8-bit weights
    quantized  tokens with 4- and 8-bit weights compared with their definitions, split too
    company    with batch_invariant: requests alone and in a batch, in one process and split
    invariant  the cost of batch_invariant: decode steps and a prompt of the 8B shape
    ops        kernels and attention backends against their definitions (tests/kernels, bf16 too)

The most important parts come first. Each part may use its own share of the time and what earlier
parts left over, but not the shares of later parts, so every part is started.

Each part runs in a process with a time limit, so that a crash, a hang or a broken device does not
end the suite; the part's earlier figures are kept. A part that lacks a package names it ("not run")
and never passes. `--device cpu` tries the suite on tiny shapes and writes nothing unless `--out` is
given. The suite itself needs only torch; tools/gpu_wheelhouse.sh brings the packages of the parts
to machines without a package index.
"""

from __future__ import annotations

import importlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks.gpu.gpu_report import CannotRunError, Report
from benchmarks.runner.own_process import call_words, end_group, own_environment
from benchmarks.runner.run import Run

LOG_LINES = 40  # number of last lines of a part's output to keep
KEY_WIDTH, VALUE_WIDTH = 44, 70


@dataclass(frozen=True, slots=True)
class Part:
    """A function of a module in this folder, and the part's share of the time.

    The function ``(device, report)`` returns whether all results were right.
    """

    module: str
    function: str
    share_s: float


# The shares add up to the budget. `ops` compiles kernels for every test, in one process per core;
# it is last, because earlier parts find errors faster.
PARTS = {
    "engine": Part("gpu_tokens", "check_engine", 70),
    "graphs": Part("gpu_tokens", "check_graphs", 40),
    "decode": Part("gpu_decode", "measure_decode", 45),
    "push": Part("gpu_push", "measure_push", 25),
    "split": Part("gpu_tokens", "check_split", 40),
    "nano": Part("gpu_decode", "measure_nano", 30),
    "kernels": Part("gpu_tokens", "measure_kernels", 15),
    "attention": Part("gpu_tokens", "measure_attention", 35),
    "products": Part("gpu_tokens", "measure_products", 55),
    "few bits": Part("gpu_decode", "measure_few_bits", 40),
    "quantized": Part("gpu_tokens", "check_quantized", 40),
    "company": Part("gpu_tokens", "check_company", 25),
    "invariant": Part("gpu_decode", "measure_invariant", 25),
    "ops": Part("gpu_tokens", "check_ops", 85),
}
BUDGET_S = 570.0
LEAST_S = 5.0  # a part is not started with less time left
STATE = ("ok", "log", "traceback", "seconds", "failed", "not run")  # keys that are no figures


def run_parts(
    parts: Mapping[str, Part], device: str, budget_s: float
) -> Iterator[tuple[str, dict[str, object]]]:
    """Run the parts; yield each part's name and result, even if no time was left for it."""
    deadline = time.monotonic() + budget_s
    shares = [part.share_s for part in parts.values()]
    for index, (name, part) in enumerate(parts.items()):
        limit_s = limit_of(shares[index:], deadline - time.monotonic())
        if limit_s < LEAST_S:
            yield name, {"ok": False, "not run": "no time was left"}
        else:
            print(f"{name} ...", flush=True)
            yield name, run_part(part, device, limit_s)


def limit_of(shares: Sequence[float], left_s: float) -> float:
    """Return the time limit of the first of these parts, given the time left for all.

    The first part gets all time that exceeds the shares of the other parts. If less time is left
    than all shares together, each share is reduced by the same factor.
    """
    share, others = shares[0], sum(shares[1:])
    return max(left_s - others, left_s * share / (share + others))


def run_part(part: Part, device: str, limit_s: float) -> dict[str, object]:
    """Run one part in a new process; return its figures, and how the process ended."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log"
        command = call_words(
            "benchmarks.gpu.gpu_suite:run_child", part.module, part.function, device, report
        )
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=own_environment(),
                start_new_session=True,
            )  # fmt: skip
            try:
                returned = str(child.wait(limit_s))
            except subprocess.TimeoutExpired:
                returned = f"stopped after {time.monotonic() - started:.0f} s"
            finally:
                end_group(child, 5.0)
        figures = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        result: dict[str, object] = {"ok": False, **figures}
        if returned != "0":
            result["ok"] = False  # the part failed after its last figure
            if "failed" not in result and "not run" not in result:
                result["failed"] = (
                    f"exit code {returned}" if returned.lstrip("-").isdigit() else returned
                )
        if not result["ok"]:
            text = log.read_text(encoding="utf-8", errors="replace")
            result["log"] = text.splitlines()[-LOG_LINES:]
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def run_child(module: str, function: str, device: str, path: str) -> None:
    """Run a part in this process, and write its figures to the file ``path``."""
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    report = Report(Path(path))
    report["ok"] = False
    try:
        run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        report["ok"] = bool(run(device, report))
    except CannotRunError as error:
        report["not run"] = str(error)
    except Exception as error:
        missing = error.__cause__ or error  # a wrapped error names the missing module
        if isinstance(missing, ModuleNotFoundError):
            report["not run"] = f"no module {missing.name}" if missing.name else str(missing)
            return
        traceback.print_exc()
        report["failed"] = f"{type(error).__name__}: {error}"
        report["traceback"] = traceback.format_exc().splitlines()


def print_table(results: dict[str, dict[str, object]]) -> None:
    """Print one line per figure, without rich, which a GPU machine may lack."""
    print(f"\n{'part':<10} {'':<8} {'figure':<{KEY_WIDTH}} value")
    for name, result in results.items():
        state = "ok" if result["ok"] else "not run" if "not run" in result else "FAILED"
        shown = {k: v for k, v in result.items() if k not in ("ok", "log", "traceback", "before")}
        for index, (key, value) in enumerate(shown.items()):
            first = (name, state) if index == 0 else ("", "")
            print(f"{first[0]:<10} {first[1]:<8} {key:<{KEY_WIDTH}} {str(value)[:VALUE_WIDTH]}")


def run(
    run: Run,
    device: str = "cuda",
    only: Sequence[str] = tuple(PARTS),
    budget: float = BUDGET_S,
    out: Path | None = None,
) -> None:
    """Run parts of the suite, and save the results after each part.

    Args:
        device: cuda or cuda:N; cpu: try the suite on tiny shapes, and save nothing.
        only: names of the parts to run.
        budget: seconds for all parts together.
        out: a file to which a second copy of the JSON is written.
    """
    run_and_save(run, PARTS, device, only, budget, out)


def run_and_save(
    run: Run,
    parts: Mapping[str, Part],
    device: str,
    only: Sequence[str],
    budget_s: float,
    out: Path | None,
    before: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> None:
    """Run the named parts, and save the results of all finished parts after each part.

    Args:
        run: the measurement that saves the results.
        parts: all parts, by name.
        device: device to measure; cpu: nothing is saved, except to ``out``.
        only: names of the parts to run.
        budget_s: seconds for all parts together.
        out: a file to which a second copy of the JSON is written.
        before: earlier figures by part, which are written beside the new figures.
    """
    if unknown := set(only) - set(parts):
        raise SystemExit(f"only: must be of {', '.join(parts)}, got {', '.join(unknown)}")
    if device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("device: there is no CUDA device here; --device cpu tries the suite")
    if device != "cpu":
        run.environment["gpu"] = torch.cuda.get_device_name(device)
    # Stopping the suite ends the running part; the results of earlier parts are still printed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results: dict[str, dict[str, object]] = {}
    try:
        for name, result in run_parts({name: parts[name] for name in only}, device, budget_s):
            known = before.get(name, {})
            earlier = {key: known[key] for key in result if key in known and key not in STATE}
            results[name] = {**result, "before": earlier} if earlier else result
            document = {"device": device, "parts": results}
            if out is not None:
                text = json.dumps({"environment": run.environment, **document}, indent=2)
                out.write_text(text + "\n", encoding="utf-8")
            if device != "cpu":
                run.save(document)
    finally:
        print_table(results)
    run.problems += [f"{name}: not right" for name, result in results.items() if not result["ok"]]
