"""Measure the speed of MACs that could guard KV blocks and messages (ADR 0025).

Each MAC runs over many buffers, which come from memory and not from a cache, and over a short one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable

import xxhash
from cryptography.hazmat.backends.openssl import backend
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.poly1305 import Poly1305

from benchmarks.runner.run import Document, Run

KEY, NONCE = bytes(range(32)), bytes(12)
SIZES = (8 * 2**10, 32 * 2**10, 128 * 2**10, 2**20)
TOTAL_BYTES = 64 * 2**20
SHORT_BYTES, NUM_SHORT = 120, 20_000
ROUNDS = 5
NOT_A_MAC = "xxh3-64 (no MAC)"


def candidates() -> dict[str, Callable[[bytes], bytes]]:
    gcm = AESGCM(KEY)
    found: dict[str, Callable[[bytes], bytes]] = {
        NOT_A_MAC: lambda data: xxhash.xxh3_64_digest(data),
        "GMAC, AES-256": lambda data: gcm.encrypt(NONCE, b"", data),
        "Poly1305": lambda data: Poly1305.generate_tag(KEY, data),
        "BLAKE2b, keyed": lambda data: hashlib.blake2b(data, key=KEY, digest_size=16).digest(),
        "HMAC-SHA256": lambda data: hmac.digest(KEY, data, "sha256"),
    }
    try:
        import blake3  # type: ignore[import-not-found, unused-ignore]  # nothing here needs it
    except ImportError:
        return found
    found["BLAKE3, keyed"] = lambda data: blake3.blake3(data, key=KEY).digest(length=16)
    return found


def best_s(mac: Callable[[bytes], bytes], buffers: list[bytes], times: int) -> float:
    """Return the seconds of one call in the best round."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(times):
            for data in buffers:
                mac(data)
        rounds.append((time.perf_counter() - started) / (times * len(buffers)))
    return min(rounds)


def run(run: Run) -> Document:
    """Measure every candidate."""
    results: dict[str, dict[str, float]] = {name: {} for name in candidates()}
    for size in SIZES:
        buffers = [os.urandom(size) for _ in range(TOTAL_BYTES // size)]
        for name, mac in candidates().items():
            speed = size / best_s(mac, buffers, 1) / 1e9
            results[name][f"{size // 1024} KiB, GB/s"] = round(speed, 2)
    short = [os.urandom(SHORT_BYTES)]
    for name, mac in candidates().items():
        microseconds = best_s(mac, short, NUM_SHORT) * 1e6
        results[name][f"{SHORT_BYTES} bytes, us"] = round(microseconds, 2)
    run.show("MAC", results)
    return {"openssl": backend.openssl_version_text(), "macs": results}
