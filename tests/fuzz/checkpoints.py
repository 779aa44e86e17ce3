"""Mutate small real checkpoints, and read each mutation whole in a process of its own.

Every mutation is a function of a seed. Reading must work, or fail with one line. Anything else (a
traceback, a signal, a hang, unbounded memory) is a finding.

    python -m tests.fuzz.checkpoints KIND SEEDS      such as: safetensors 0:500
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from baton.api.errors import BatonError, InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.gguf import folder as gguf_folder
from baton.checkpoint.model_folder import find_model_folder, read_limits
from baton.checkpoint.model_identity import folder_identity
from baton.checkpoint.sampling_defaults import read_sampling_defaults
from baton.text.tokenizer import Tokenizer
from engine.offline.llm import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.gguf_conversion import converted, write_checkpoint
from tests.fakes.checkpoints.gguf_files import write_model
from tests.numerics.gguf_families import GGUF_FAMILIES, SHAPE, common_fields
from tests.numerics.tiny_models import make_hugging_face_model, save

TIMEOUT_S = 10  # of CPU time, which other processes on a busy machine do not lengthen
CLOCK_TIMEOUT_S = 60  # a reading that waits for ever takes no CPU time
MEMORY_BYTES = 3 * 2**30  # of address space, beyond what is mapped at the start
_MAX_LINE = 4000
# Values that replace a number, a text, a list or an object of a JSON file.
_ODD: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 61, 2**31, 2**62, 2**64, 10**30, -(2**63), 0.5, 1e308, float("inf"),
    float("nan"), "", "1", "x" * 3000, [], [0], [[]], {}, {"a": 1}, None, True, False,
    [1e9] * 3, list(range(70)), {"type": "x"}, "\ud800", -0.0,
)  # fmt: skip
# GGUF files of families with other changes to tensors, each in two parts.
GGUF_KINDS = {
    "gguf-norms": "gemma3",
    "gguf-latents": "deepseek2 (V3)",
    "gguf-states": "granitehybrid (experts)",
    "gguf-deltas": "qwen35",
}
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of a JSON value's parts."""
    yield path
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        parts = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, part in parts[:200]:
        yield from _paths(part, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy


def _nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


def mutated_json(text: str, rng: random.Random) -> str:
    """Change a JSON text: a part, a key, its end, or its depth."""
    match rng.randrange(8):
        case 0:
            return text[: rng.randrange(len(text))]
        case 1:
            depth = rng.choice((30, 500, 5000, 200_000))
            return text.rstrip().rstrip("}") + f', "deep": {_nested(depth)}}}'
        case 2:
            return text.rstrip().rstrip("}") + ', "long": ' + "9" * 5000 + "}"
        case 3:
            at = rng.randrange(len(text))
            return text[:at] + rng.choice("{}[],:\"'\\0\n\x00é") + text[at + 1 :]
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 3))):
        paths = list(_paths(value))
        path = rng.choice(paths)
        new = rng.choice(_ODD)
        if rng.random() < 0.1:
            new = json.loads(_nested(rng.choice((21, 100, 900))))
        value = _replaced(value, path, new)
    changed = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    return changed.encode(errors="replace").decode()


def mutated_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Change a safetensors file: its header's length, its header, or its end."""
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    match rng.randrange(7):
        case 0:
            return (
                struct.pack("<Q", rng.choice((0, 1, length + 1, 2**31, 2**62, 2**64 - 1)))
                + (content[8:])
            )
        case 1:
            return content[: rng.randrange(len(content))]
        case 2:
            text = mutated_json(json.dumps(header), rng).encode(errors="replace")
            return struct.pack("<Q", len(text)) + text + data
        case 3:
            name = rng.choice(names)
            begin, end = header[name]["data_offsets"]
            header[name]["data_offsets"] = rng.choice(
                ([2**62, 2**62 + end - begin], [end, begin], [begin, end + 4], [begin + 4, end + 4],
                 [-4, end], [begin, 10**30], [float(begin), end], [0, end - begin], [begin], "x")
            )  # fmt: skip
        case 4:
            name = rng.choice(names)
            shape = header[name]["shape"]
            header[name]["shape"] = rng.choice(
                (shape[::-1], [*shape, 1], [2**40] * 3, [0], [-1, *shape], [1.5], [], shape[:1])
            )
        case 5:
            header[rng.choice(names)]["dtype"] = rng.choice(("F16", "I64", "U8", "BOOL", "X", 3))
        case _:
            one, other = rng.choice(names), rng.choice(names)
            header[one]["data_offsets"] = header[other]["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mutated_gguf(content: bytes, rng: random.Random) -> bytes:
    """Change a GGUF file: words and bytes of its header, or its end."""
    data = bytearray(content)
    size = min(len(data), 60_000)
    if rng.random() < 0.15:
        return bytes(data[: rng.randrange(len(data))])
    if rng.random() < 0.35:
        return _with_other_shape(data, rng)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(4, size - 8)
        if rng.random() < 0.5:  # behind a name, where shapes, types and offsets stand
            found = [i for i in range(len(data) - 8) if data[i : i + 7] == b".weight"]
            at = rng.choice(found) + 7 + 4 * rng.randrange(10) if found else at
        odd = rng.choice((0, 1, 2, 31, 32, 2**31, 2**62, 2**64 - 1, rng.randrange(300)))
        width = rng.choice((1, 4, 8))
        data[at : at + width] = (odd % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(data)


def _with_other_shape(data: bytearray, rng: random.Random) -> bytes:
    """Transpose a tensor, or give it one column, no row, or other numbers."""
    names = [at for at in range(len(data) - 8) if data[at : at + 7] == b".weight"]
    at = rng.choice(names) + 7
    (rank,) = struct.unpack_from("<I", data, at)
    shape = struct.unpack_from(f"<{rank}Q", data, at + 4)
    size = 1
    for number in shape:
        size *= number
    odd = [0, 1, 2**31, 2**62, 2**64 - 1, rng.randrange(100)]
    others = [shape[::-1], (1, size), (size, 1), *((number, *shape[1:]) for number in odd)]
    struct.pack_into(f"<{rank}Q", data, at + 4, *(*rng.choice(others), 1, 1)[:rank])
    return bytes(data)


def mutate(kind: str, folder: Path, seed: int) -> str:
    """Change one file of a checkpoint's copy; returns its name."""
    rng = random.Random(f"{kind}-{seed}")
    if kind.startswith("gguf"):
        path = rng.choice(sorted(folder.glob("*.gguf")))
        path.write_bytes(mutated_gguf(path.read_bytes(), rng))
        return path.name
    if kind == "safetensors":
        path = rng.choice(sorted(folder.glob("*.safetensors")))
        path.write_bytes(mutated_safetensors(path.read_bytes(), rng))
        return path.name
    path = folder / rng.choice([name for name in _JSON_FILES if (folder / name).exists()])
    text = mutated_json(path.read_text(encoding="utf-8"), rng)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path.name


# ------------------------------------------------------------------ readings


def read_whole(folder: Path) -> None:
    """Read a checkpoint as a router and as a node do, and compute a token."""
    # This process is a throw-away, so files made from a mutated header stay in its folder.
    setattr(gguf_folder, "own_cache_folder", lambda _: folder.parent)  # noqa: B010
    found = find_model_folder(str(folder))
    read_limits(found)
    read_sampling_defaults(found)
    folder_identity(found)
    if Tokenizer.exists_in(found):
        tokenizer = Tokenizer(found)
        tokenizer.encode("def add(a, b):\n    return")
        if tokenizer.chat_template is not None:
            with contextlib.suppress(InvalidRequestError):
                tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    llm = LLM(str(folder), num_blocks=8, max_num_requests=2, max_num_batched_tokens=16)
    llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2, temperature=0))


def outcome_of(read: Callable[[], None]) -> str:
    """Read in a forked process; returns ``works``, ``refused: LINE``, or ``FINDING: ...``."""
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if not child:
        ours.close()
        theirs.send(_read_in_child(read))
        os._exit(0)
    theirs.close()
    outcome = ""
    if ours.poll(CLOCK_TIMEOUT_S):
        try:
            outcome = ours.recv()
        except EOFError:
            outcome = ""
    else:
        outcome = f"FINDING: still at it after {CLOCK_TIMEOUT_S} s"
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return outcome or f"FINDING: ended by {signal.Signals(os.WTERMSIG(status)).name}"


def _read_in_child(read: Callable[[], None]) -> str:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT_S, TIMEOUT_S + 1))
    try:
        read()
    except BatonError as error:
        line = str(error)
        is_one_line = line.isprintable() and len(line) < _MAX_LINE
        if not is_one_line:
            return f"FINDING: {len(line)} characters: {line!r:.300}"
        return f"refused: {line}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-6:]))
        return f"FINDING: {type(error).__name__}: {str(error)[:200]!r} at {places}"
    return "works"


def findings(
    kind: str, original: Path, seeds: range, also: Callable[[int, str, str], None] | None = None
) -> Mapping[int, str]:
    """Read the mutations of a checkpoint by these seeds; returns the findings by seed.

    Args:
        also: called with each seed, its changed file, and its outcome.
    """
    found: dict[int, str] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            shutil.copytree(original, folder)
            changed = mutate(kind, folder, seed)
            outcome = outcome_of(lambda: read_whole(folder))  # noqa: B023 - called at once
        if outcome.startswith("FINDING"):
            found[seed] = f"{changed}: {outcome}"
        if also is not None:
            also(seed, changed, outcome)
    return found


def make_original(kind: str, folder: Path) -> Path:
    """Make the small checkpoint whose mutations are read."""
    if kind == "gguf":
        return _make_gguf(folder)
    if kind in GGUF_KINDS:
        return _make_gguf_of_family(folder, GGUF_KINDS[kind])
    model = make_hugging_face_model("Qwen2MoeForCausalLM" if kind == "moe" else "LlamaForCausalLM")
    save(model, folder, max_shard_size="20KB" if kind == "json" else "5GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


def _make_gguf(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = make_hugging_face_model("LlamaForCausalLM", hidden_size=32, intermediate_size=64)
    write_model(folder / "tiny.gguf", model, GGMLQuantizationType.Q8_0)
    return folder


def _make_gguf_of_family(folder: Path, family: str) -> Path:
    """Write the tiny model of a family whose tensors are changed as they are read, in two parts."""
    row = GGUF_FAMILIES[family]
    model = make_hugging_face_model(row.model, **{**SHAPE, **row.shape})
    with tempfile.TemporaryDirectory() as name:
        save(model, Path(name))
        tensors = load_file(Path(name) / "model.safetensors")
    architecture, config = family.partition(" ")[0], model.config
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(
        folder / "tiny.gguf",
        architecture,
        converted(architecture, tensors, config),
        GGMLQuantizationType.Q8_0,
        common_fields(config) | row.fields(config),
        vocab_size=config.vocab_size,
        num_parts=2,
    )
    return folder


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(kind: str, seeds: range) -> int:
    """Print every outcome, findings with their seeds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        original = make_original(kind, Path(name) / "original")
        _say("unchanged:", outcome_of(lambda: read_whole(original)))
        began = time.monotonic()
        found = findings(kind, original, seeds, _say)
    _say(f"{len(found)} findings of {len(seeds)} in {time.monotonic() - began:.0f} s")
    for seed, what in found.items():
        _say(seed, what)
    return bool(found)


if __name__ == "__main__":
    first, _, last = sys.argv[2].partition(":")
    sys.exit(main(sys.argv[1], range(int(first), int(last))))
