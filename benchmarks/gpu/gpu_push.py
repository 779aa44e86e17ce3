"""A part of the GPU suite: sends KV over NIXL between two processes on one device.

One process registers a cache and waits; the other writes all its blocks into that cache, in blocks
of 16 and of 128 tokens of Qwen3-8B's shape. A copy on the device is measured for comparison.
Refuses to know: the hand-off's protocol.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.gpu_report import Report
from benchmarks.kernels.gpu_timing import copy_gb_per_s
from benchmarks.runner.own_process import call_words, own_environment
from kvconnector.layout import KVLayout
from kvconnector.transports.nixl.agent import NixlAgent

LAYERS, KV_HEADS, HEAD_DIM = 36, 8, 128
TOKENS = 4096  # tokens in the cache; 604 MB in bfloat16
REPEAT = 5
PATIENCE_S = 30.0


def measure_push(device: str, report: Report) -> bool:
    """Measure the GB/s of KV that is sent, and those of a copy within the device."""
    on_gpu = device != "cpu"
    tokens = TOKENS if on_gpu else 256
    report["copy on the device, GB/s of payload"] = copy_gb_per_s(device, 2**29) / 2
    right = True
    for block_size in (16, 128):
        kv_cache = make_cache(device, block_size, tokens)
        kv_cache.random_(0, 100)
        with TemporaryDirectory() as folder, _receiver(device, block_size, tokens, folder):
            layout, name = KVLayout.of(kv_cache), f"send-{block_size}"
            agent = NixlAgent(name, [layout], "VRAM" if on_gpu else "DRAM")
            Path(folder, name).write_bytes(agent.metadata())
            peer = f"recv-{block_size}"
            agent.add_peer(peer, _read(Path(folder, peer)))
            descriptors = np.load(Path(folder, "descriptors.npy"))
            tables = agent.prepare("", layout.descriptors()), agent.prepare(peer, descriptors)
            blocks = np.arange(layout.num_blocks, dtype=np.int32)
            scattered = np.random.default_rng(0).permutation(blocks).astype(np.int32)
            for how, remote in (("in a row", blocks), ("scattered", scattered)):
                seconds = [_push(agent, peer, tables, blocks, remote) for _ in range(REPEAT)]
                speed = kv_cache.nbytes / statistics.median(seconds[1:]) / 1e9
                report[f"blocks of {block_size} tokens, {how}: GB/s"] = speed
                report[f"blocks of {block_size} tokens, {how}: ms"] = min(seconds) * 1e3
            Path(folder, "expected").write_text(str(digest(kv_cache, scattered)))
            right = right and _read(Path(folder, "verdict")) == b"equal"
            agent.release_peer(peer, tables[1:])
            agent.close(tables[:1])
        report[f"blocks of {block_size} tokens: arrived"] = right
    return right


def make_cache(device: str, block_size: int, tokens: int) -> torch.Tensor:
    """Return a cache `[num_blocks, LAYERS, 2, KV_HEADS, block_size, HEAD_DIM]`."""
    shape = (tokens // block_size, LAYERS, 2, KV_HEADS, block_size, HEAD_DIM)
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def digest(kv_cache: torch.Tensor, places: npt.NDArray[np.int32]) -> float:
    """Return a checksum that shows whether block i is at ``places[i]``.

    It is exact if the cache contains small whole numbers.
    """
    sums = kv_cache.flatten(1).sum(dim=1, dtype=torch.float64).cpu().numpy()
    return float((sums * (places + 1)).sum())


def _push(
    agent: NixlAgent,
    peer: str,
    tables: tuple[object, object],
    local: npt.NDArray[np.int32],
    remote: npt.NDArray[np.int32],
) -> float:
    started = time.perf_counter()
    handle = agent.post_write(peer, tables[0], local, tables[1], remote)
    while not agent.is_done(peer, handle):
        if time.perf_counter() - started > PATIENCE_S:
            raise TimeoutError(f"a write of {len(local)} blocks took more than {PATIENCE_S} s")
    return time.perf_counter() - started


@contextmanager
def _receiver(device: str, block_size: int, tokens: int, folder: str) -> Iterator[None]:
    """Run the receiving process during the ``with`` block."""
    call = call_words("benchmarks.gpu.gpu_push:receive", device, block_size, tokens, folder)
    child = subprocess.Popen(call, env=own_environment())
    try:
        yield
    finally:
        Path(folder, "end").touch()
        child.wait(PATIENCE_S)


def _read(path: Path) -> bytes:
    """Wait until the other process has written the file; return the file's content."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or not path.read_bytes():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name}: the other process has not written it")
        time.sleep(0.01)
    time.sleep(0.05)  # the file may exist before its content is complete
    return path.read_bytes()


def receive(device: str, num_tokens_of_block: str, num_tokens: str, path: str) -> None:
    """Offer a cache to the sender, poll NIXL until the sender ends, and check the blocks."""
    block_size, tokens, folder = int(num_tokens_of_block), int(num_tokens), Path(path)
    if device != "cpu":
        torch.cuda.set_device(torch.device(device).index or 0)
    kv_cache = make_cache(device, block_size, tokens)
    layout, name = KVLayout.of(kv_cache), f"recv-{block_size}"
    agent = NixlAgent(name, [layout], "DRAM" if device == "cpu" else "VRAM")
    np.save(folder / "descriptors.npy", layout.descriptors())
    (folder / name).write_bytes(agent.metadata())
    sender = f"send-{block_size}"
    agent.add_peer(sender, _read(folder / sender))
    while not (folder / "end").exists():
        agent.take_notifications()
        expected = folder / "expected"
        if expected.exists() and not (folder / "verdict").exists():
            found = digest(kv_cache, np.arange(len(kv_cache), dtype=np.int32))
            same = found == float(_read(expected))
            (folder / "verdict").write_text("equal" if same else f"differs: {found}")
    agent.release_peer(sender, ())
