"""GGUF files of the hub by quantization: fetched in parts, again from where it ended, and offline.

A process of its own fetches from a server on loopback, as the hub's address is read at its start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from gguf import GGMLQuantizationType

from baton.processes.free_address import free_address
from tests.fakes.checkpoints.gguf_files import plain_vocabulary, write_gguf
from tests.fakes.outside.hub_server import HubServer, serve_hub

pytestmark = pytest.mark.medium

REPOSITORY = "some-owner/some-model-GGUF"
FIND = """
import logging, sys
from baton.api.errors import ModelLoadError
from baton.checkpoint.model_folder import find_model_folder
logging.basicConfig(level=logging.INFO)
try:
    print("folder", find_model_folder(sys.argv[1], weights=False))
except ModelLoadError as error:
    print("refused", error)
"""
CHUNK_BYTES = 10 * 2**20  # that the hub's library writes at once
NUM_COLUMNS = 80_000  # so that the file of one part has more
FIELDS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": NUM_COLUMNS,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
PARTS = [f"Q8_0/tiny-Q8_0-{part:05}-of-00002.gguf" for part in (1, 2)]


def contents(folder: Path) -> dict[str, bytes]:
    """Make a model of one file, and one of two parts."""
    rows = numpy.ones((40, NUM_COLUMNS), dtype=numpy.float32)
    kind = GGMLQuantizationType.F32
    tensors = {"token_embd.weight": (rows, kind), "output.weight": (rows * 2, kind)}
    (folder / "Q8_0").mkdir()
    for name, num_parts in (("tiny-Q4_K_M.gguf", 1), ("Q8_0/tiny-Q8_0.gguf", 2)):
        path = folder / name
        write_gguf(path, "llama", tensors, FIELDS, plain_vocabulary(40), num_parts=num_parts)
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.gguf"))}
    return {name: path.read_bytes() for name, path in found.items()} | {"mmproj-F16.gguf": b"GGUF"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    (tmp_path / "there").mkdir()
    with serve_hub(REPOSITORY, contents(tmp_path / "there")) as server:
        yield server


def start(tmp_path: Path, url: str, model: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "hugging"),
        "BATON_CACHE": str(tmp_path / "cache"),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.Popen(
        [sys.executable, "-c", FIND, model],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def find(tmp_path: Path, url: str, model: str) -> tuple[str, str]:
    output, errors = start(tmp_path, url, model).communicate(timeout=100)
    return output.strip(), errors


def test_a_quantization_is_fetched_once_and_served_without_the_hub(
    tmp_path: Path, hub: HubServer
) -> None:
    output, errors = find(tmp_path, hub.url, f"{REPOSITORY}:q8_0")
    assert output.startswith("folder"), output + errors
    assert hub.asked == [(name, 0) for name in PARTS]
    assert f"fetching {PARTS[0]} of {REPOSITORY}: 0 of" in errors
    again, _ = find(tmp_path, hub.url, f"hf://{REPOSITORY}:Q8_0")
    assert again == output
    assert len(hub.asked) == len(PARTS)
    nobody = f"http://{free_address()}"
    offline, _ = find(tmp_path, nobody, f"{REPOSITORY}:Q8_0")
    assert offline == output
    other, _ = find(tmp_path, nobody, f"{REPOSITORY}:Q4_K_M")
    assert other.startswith("refused model: 'some-owner/some-model-GGUF:Q4_K_M'")
    assert "\n" not in other


def test_a_download_goes_on_from_where_it_ended(tmp_path: Path, hub: HubServer) -> None:
    name = "tiny-Q4_K_M.gguf"
    hub.stops_after = CHUNK_BYTES + 1000
    process = start(tmp_path, hub.url, f"{REPOSITORY}:Q4_K_M")
    cache = tmp_path / "cache" / "hub"
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size == CHUNK_BYTES for path in cache.rglob("*.part")):
        assert time.monotonic() < deadline, "the first bytes never came"
        time.sleep(0.05)
    process.kill()
    process.communicate()
    hub.stops_after = None
    hub.resumes.set()
    output, errors = find(tmp_path, hub.url, f"{REPOSITORY}:Q4_K_M")
    assert output.startswith("folder"), output + errors
    assert hub.asked == [(name, 0), (name, CHUNK_BYTES)]
    assert next(cache.rglob(name)).read_bytes() == hub.files[name]


def test_a_repository_of_several_quantizations_names_them(tmp_path: Path, hub: HubServer) -> None:
    output, _ = find(tmp_path, hub.url, REPOSITORY)
    expected = "has .gguf files of several kinds; name one, as some-owner/some-model-GGUF:KIND"
    assert f"{expected}: Q4_K_M, Q8_0" in output
    output, _ = find(tmp_path, hub.url, f"{REPOSITORY}:Q5_K_M")
    assert "has no .gguf file of Q5_K_M; it has: Q4_K_M, Q8_0" in output
