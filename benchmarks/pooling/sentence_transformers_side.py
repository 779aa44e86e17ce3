"""Times sentence-transformers in this process, and prints JSON that pooling.py reads.

Run this with the Python of sentence-transformers' environment. Refuses to know: Baton.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.pooling.texts import BATCH, CASES, texts_of


def main() -> None:
    """Load the model, warm up, time each round; print one line of JSON."""
    folder, dtype, threads, rounds, file = sys.argv[1:]
    torch.set_num_threads(int(threads))
    options = {"dtype": getattr(torch, dtype)}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=options)
    seconds: dict[str, list[float]] = {}
    for case in CASES:
        model.encode(texts_of(case, -1)[:BATCH], batch_size=BATCH)
        seconds[case] = []
        for number in range(int(rounds)):
            texts = texts_of(case, number)
            start = time.perf_counter()
            model.encode(texts, batch_size=BATCH)
            seconds[case].append(time.perf_counter() - start)
    found = model.encode(texts_of("64 tokens", 0)[:BATCH], batch_size=BATCH)
    Path(file).write_text(json.dumps(found.tolist()))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
