"""Compare activations and KV in float32 and in bfloat16 on this CPU, with one GGUF file.

Both engines live in one process and take turns, case by case. The speeds show which dtype ``--dtype
auto`` should choose on this kind of CPU. The KL divergence of the next token's distribution from
float32's (in nats) shows the error of bfloat16; the measurement `divergence` shows the error of the
file's own rounding.

    python -m benchmarks dtypes --files smollm2 model.Q4_K_M.gguf
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from baton.checkpoint.model_folder import find_model_folder
from baton.text.tokenizer import Tokenizer
from benchmarks.engine_cpu.engine_cpu import instruction_set
from benchmarks.engine_cpu.perplexity import TEXTS
from benchmarks.runner.environment import ROOT
from benchmarks.runner.own_process import answer_of, own_environment
from benchmarks.runner.run import Document, Run

BUILD = ROOT / "build" / "dtypes"
SUBJECTS = Path(__file__).parent / "divergence_subjects.py"
DTYPES = ("float32", "bfloat16")
LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts or decode steps to time.

    Attributes:
        prompt_tokens: number of tokens of each prompt.
        num_prompts: number of prompts in the batch.
        decode_steps: number of timed decode steps; 0: the prompts are timed.
    """

    prompt_tokens: int
    num_prompts: int = 1
    decode_steps: int = 0

    @property
    def name(self) -> str:
        """The case's name in tables and JSON."""
        what = f"decode of {self.num_prompts} at" if self.decode_steps else "prompt of"
        return f"{what} {self.prompt_tokens}"


CASES = (
    Case(128),
    Case(512),
    Case(2048),
    Case(128, 1, 32),
    Case(2048, 1, 32),
    Case(512, 8, 32),
    Case(256, 32, 16),
)


def time_case(llm: Any, case: Case, seed: int) -> float:
    """Return the case's milliseconds per prompt, or per decode step."""
    from baton.api.sampling_params import SamplingParams

    random.seed(f"{seed} {case.name}")  # no two prompts share a beginning
    size, count = case.prompt_tokens, case.num_prompts
    prompts = [[random.randrange(100, 20_000) for _ in range(size)] for _ in range(count)]

    def seconds(num_tokens: int) -> float:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    first = seconds(1)
    if not case.decode_steps:
        return 1000 * first
    alone = seconds(1)  # the prompts are in the prefix cache now
    return 1000 * (seconds(1 + case.decode_steps) - alone) / case.decode_steps


def time_file(file: str, threads: int, rounds: int) -> dict[str, Any]:
    """Time every case with both dtypes in this process; return medians in ms."""
    from engine import LLM

    llms = {
        dtype: LLM(
            file,
            dtype=dtype,
            num_threads=threads,
            kv_cache_bytes=3 * 2**29,
        )
        for dtype in DTYPES
    }
    times: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        for case in CASES:
            for dtype in DTYPES if number % 2 else reversed(DTYPES):
                ms = time_case(llms[dtype], case, number)
                if number:  # the first round warms up
                    times.setdefault(case.name, {}).setdefault(dtype, []).append(ms)
    return {
        case: {dtype: round(statistics.median(ms), 3) for dtype, ms in found.items()}
        for case, found in times.items()
    }


def diverge(file: str, windows: Path, threads: int, weights: str) -> dict[str, float]:
    """Return the divergence of bfloat16 from float32 with the same weights."""
    logits = BUILD / "logits.npy"
    shared = [
        *(sys.executable, "-P", str(SUBJECTS), "--engine", "baton", "--file", file),
        *("--windows", str(windows), "--logits", str(logits), "--threads", str(threads)),
        *("--weights", weights),
    ]
    options: dict[str, Any] = {"check": True, "timeout": LIMIT_S, "env": own_environment(ROOT)}
    subprocess.run([*shared, "--write"], stdout=subprocess.DEVNULL, **options)
    said = subprocess.run(
        [*shared, "--dtype", "bfloat16"], stdout=subprocess.PIPE, text=True, **options
    )
    logits.unlink()
    found: dict[str, float] = json.loads(said.stdout.strip().splitlines()[-1])
    return found


def write_windows(file: str, num_windows: int, num_tokens: int) -> Path:
    """Write windows of this repository's prose as JSON; return the file."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    tokens = list(Tokenizer(find_model_folder(file)).encode(text))
    windows = [tokens[i * num_tokens : (i + 1) * num_tokens] for i in range(num_windows)]
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / "windows.json"
    path.write_text(json.dumps(windows))
    return path


def run(
    run: Run,
    files: Sequence[str] = ("smollm2",),
    threads: int = 2,
    rounds: int = 3,
    windows: int = 4,
) -> Document:
    """Time both dtypes in turns, and score both.

    Args:
        files: paths of GGUF files; ``smollm2``: SmolLM2's file.
        windows: number of windows of 512 tokens to score.
    """
    from benchmarks.served.served_bench import find_model

    results: dict[str, object] = {}
    for word in files:
        path = str(find_model(run.console, word).gguf)
        command = [sys.executable, "-P", __file__, path, str(threads), str(rounds)]
        times: dict[str, dict[str, float]] = answer_of(command, env=own_environment(ROOT))
        scored = write_windows(path, windows, 512)
        kl = {weights: diverge(path, scored, threads, weights) for weights in ("auto", "fp32")}
        results[Path(path).stem] = {"times_ms": times, "divergence": kl}
        table = Table("case", *DTYPES, "ratio", title=f"{Path(path).stem}, ms", box=None)
        for case, ms in times.items():
            own = [ms[dtype] for dtype in DTYPES]
            table.add_row(case, *(f"{one:.2f}" for one in own), f"{own[1] / own[0]:.3f}")
        run.console.print(table)
        for weights, found in kl.items():
            run.console.print(f"KL to float32, weights {weights}: {found}")
    return {"instruction_set": instruction_set(), "files": results}


if __name__ == "__main__":  # `diverge` runs this file in a process of its own
    print(json.dumps(time_file(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
