"""Measure the rounding error of Baton and of llama.cpp with the same GGUF files.

The reference for each file is Baton in float32 with the file's dequantized weights. Two figures are
measured: the KL divergence of the next token's distribution from the reference's (in nats, mean
over all positions), and how often the most likely next token is equal. The scored texts are windows
of this repository's prose, or of code for the demo model. llama.cpp quantizes the files with its
usual mixtures of types. The first run builds llama.cpp for this CPU, as `engine_cpu.py` does.

    python -m benchmarks divergence
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from baton.checkpoint.model_folder import find_model_folder
from baton.checkpoint.packaged_model import SMOLLM2
from baton.text.tokenizer import Tokenizer
from benchmarks.engine_cpu.engine_cpu import instruction_set, python_of
from benchmarks.engine_cpu.perplexity import DEMO_MODEL, DEMO_TEXTS, TEXTS
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Document, Run
from examples.demo import fetch_model

BUILD = ROOT / "build" / "divergence"
SUBJECTS = Path(__file__).parent / "divergence_subjects.py"
# Row of the results -> llama.cpp's name of the file's mixture of types.
KINDS = {
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q4_K": "Q4_K_M",
    "Q5_K": "Q5_K_M",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
}
ENGINES = ("baton", "llamacpp")
LIMIT_S = 1800
_MAKE = "from benchmarks.engine_cpu.gguf_checkpoints import *; import sys; a = sys.argv; "


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, whose GGUF files of several types are compared.

    Attributes:
        name: the model's name in tables.
        whole: GGUF file from which the other files are made.
        own_kind: the type of ``whole``, if ``KINDS`` contains it; else "".
        tokenizer: folder or GGUF file of the model whose tokenizer splits the texts.
        texts: files to score, relative to the repository's root.
    """

    name: str
    whole: Path
    own_kind: str
    tokenizer: str
    texts: tuple[str, ...]


def run_python(peer_python: Path, words: list[str]) -> str:
    """Run Python code with the peer's Python; return its output, or raise CalledProcessError."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [str(peer_python), *words],
        check=True,
        stdout=subprocess.PIPE,
        stderr=None if peer_python == Path(sys.executable) else subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        cwd=BUILD,
    )
    return done.stdout


def find_subjects(console: Console, peer: Path) -> list[Subject]:
    """Return the models to compare; raise SystemExit if SmolLM2 cannot be fetched."""
    BUILD.mkdir(parents=True, exist_ok=True)
    path = fetch_model(console, SMOLLM2)
    if path is None:
        raise SystemExit("the model cannot be had")
    demo = BUILD / "demo"
    if not demo.exists():
        shutil.copytree(DEMO_MODEL, demo)
    call = "print(as_gguf(Path(a[1]), ''))"
    whole = Path(run_python(peer, ["-c", _MAKE + call, str(demo)]).split()[-1])
    return [
        Subject("SmolLM2-135M", Path(path), "Q4_1", path, TEXTS),
        Subject("demo model", whole, "", str(DEMO_MODEL), DEMO_TEXTS),
    ]


def write_windows(subject: Subject, num_windows: int, num_tokens: int) -> Path:
    """Write windows of the subject's texts, as token ids in JSON; return the file."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in subject.texts)
    tokens = list(Tokenizer(find_model_folder(subject.tokenizer)).encode(text))
    windows = [tokens[i * num_tokens : (i + 1) * num_tokens] for i in range(num_windows)]
    assert len(windows[-1]) == num_tokens, "the text is too short"
    path = BUILD / "windows.json"
    path.write_text(json.dumps(windows))
    return path


def make_file(subject: Subject, kind: str, peer: Path) -> Path:
    """Return the path of the subject's file of this kind; write the file if it is missing."""
    if kind == subject.own_kind:
        return subject.whole
    path = BUILD / f"{subject.whole.stem}-{kind}.gguf"
    if not path.exists():
        call = "quantize(Path(a[1]), Path(a[2]), a[3])"
        run_python(peer, ["-c", _MAKE + call, str(subject.whole), str(path), KINDS[kind]])
    return path


def measure(path: Path, windows: Path, peer: Path, threads: int) -> dict[str, dict[str, float]]:
    """Score one GGUF file with the reference and both engines; return both divergences."""
    logits = BUILD / "logits.npy"
    shared = [
        *("--file", str(path), "--windows", str(windows)),
        *("--logits", str(logits), "--threads", str(threads)),
    ]
    here = Path(sys.executable)
    reference = ["--engine", "baton", "--weights", "fp32", "--write"]
    run_python(here, [str(SUBJECTS), *shared, *reference])
    found = {}
    for engine in ENGINES:
        python = here if engine == "baton" else peer
        said = run_python(python, ["-P", str(SUBJECTS), *shared, "--engine", engine])
        found[engine] = json.loads(said.strip().splitlines()[-1])
    logits.unlink()
    return found


def run(
    run: Run,
    windows: int = 8,
    tokens: int = 512,
    threads: int = 2,
    kinds: Sequence[str] = tuple(KINDS),
    models: str = "",
) -> Document:
    """Make the files and score them.

    Args:
        tokens: number of tokens of a window.
        kinds: types of files to score, by their names in `KINDS`.
        models: the models to score: those whose names contain one of these texts.
    """
    peer = python_of("llamacpp")
    files: dict[str, dict[str, object]] = {}
    for subject in find_subjects(run.console, peer):
        if models not in subject.name:
            continue
        prompts = write_windows(subject, windows, tokens)
        for kind in kinds:
            found = measure(make_file(subject, kind, peer), prompts, peer, threads)
            ours, theirs = (found[engine] for engine in ENGINES)
            ratio = round(ours["kl"] / theirs["kl"], 3)
            files[f"{subject.name} {kind}"] = {"kl_ratio": ratio, **found}
            run.console.print(subject.name, kind, files[f"{subject.name} {kind}"])
    return {"instruction_set": instruction_set(), "files": files}
