"""Score windows of tokens with one engine and one GGUF file; `divergence.py` starts it.

The script runs with the Python of the engine, Baton or llama.cpp. Refuses to know: which files are
compared, what is reported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Score = Callable[[list[int]], Array]  # logits of all positions except the last, [n - 1, vocabulary]
SLICE = 64  # number of positions that are compared at a time


def baton(path: Path, threads: int, weights: str, dtype: str) -> Score:
    """Score with Baton; ``weights`` and ``dtype`` are the node's options of these names."""
    from unittest import mock

    import torch

    from baton.api.sampling_params import SamplingParams
    from engine import LLM
    from engine.sampling import logprobs

    torch.set_num_threads(threads)
    llm = LLM(str(path), dtype=dtype, weights=weights, prefix_cache=False)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)

    def score(window: list[int]) -> Array:
        kept: list[Array] = []
        original = logprobs._token_logprobs

        def keep(logits: torch.Tensor, *others: Any) -> Any:
            kept.append(logits.float().numpy().copy())
            return original(logits, *others)

        with mock.patch.object(logprobs, "_token_logprobs", keep):
            llm.generate([window], params)
        return np.concatenate(kept)[: len(window) - 1]

    return score


def llamacpp(path: Path, threads: int, weights: str, dtype: str) -> Score:
    """Score with llama.cpp, its default options, and the file's weights as stored."""
    import llama_cpp as api

    assert (weights, dtype) == ("auto", "float32")
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    contexts: list[Any] = []

    def score(window: list[int]) -> Array:
        size = len(window)
        if not contexts:
            options = api.llama_context_default_params()
            options.n_ctx = options.n_batch = size
            options.n_threads = options.n_threads_batch = threads
            contexts.append(api.llama_init_from_model(model, options))
        context = contexts[0]
        api.llama_memory_clear(api.llama_get_memory(context), True)
        batch = api.llama_batch_init(size, 0, 1)
        batch.n_tokens = size
        for index, token in enumerate(window):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, True
        done = api.llama_decode(context, batch)
        assert done == 0, done
        found = np.empty((size - 1, vocabulary), np.float32)
        for index in range(size - 1):
            row = api.llama_get_logits_ith(context, index)
            found[index] = np.ctypeslib.as_array(row, (vocabulary,))
        api.llama_batch_free(batch)
        return found

    return score


ENGINES: dict[str, Callable[[Path, int, str, str], Score]] = {"baton": baton, "llamacpp": llamacpp}


def log_softmax(logits: Array) -> Array:
    """Return the natural logarithms of the tokens' probabilities, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def compare(logits: Array, reference: Array) -> Iterator[tuple[Array, Array]]:
    """Yield KL divergences from the reference (nats), and whether the top tokens are equal.

    Each yielded pair of arrays covers ``SLICE`` positions.

    Args:
        logits: the scored engine's logits ``[n, vocabulary]``.
        reference: the reference's logits ``[n, vocabulary]``.
    """
    for start in range(0, len(logits), SLICE):
        true, found = (log_softmax(one[start : start + SLICE]) for one in (reference, logits))
        divergence = (np.exp(true) * (true - found)).sum(axis=1)
        yield divergence, true.argmax(axis=1) == found.argmax(axis=1)


def main() -> None:
    """Score every window; write the logits, or print their divergence from logits in a file."""
    parser = argparse.ArgumentParser(description="One side of divergence.py.")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--file", type=Path, required=True, help="of GGUF")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--dtype", default="float32", help="of activations and KV")
    parser.add_argument("--windows", type=Path, required=True, help="JSON: lists of tokens")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--logits", type=Path, required=True, help="of the reference, .npy")
    parser.add_argument("--write", action="store_true", help="the logits: this is the reference")
    arguments = parser.parse_args()
    windows = json.loads(arguments.windows.read_text())
    make = ENGINES[arguments.engine]
    score = make(arguments.file, arguments.threads, arguments.weights, arguments.dtype)
    if arguments.write:
        np.save(arguments.logits, np.stack([score(window) for window in windows]))
        return
    reference = np.load(arguments.logits, mmap_mode="r")
    pairs = (pair for i, one in enumerate(windows) for pair in compare(score(one), reference[i]))
    divergences, same = (np.concatenate(column) for column in zip(*pairs, strict=True))
    result = {
        "kl": float(divergences.mean()),
        "kl_standard_error": float(divergences.std() / len(divergences) ** 0.5),
        "kl_median": float(np.median(divergences)),
        "same_likeliest_token": float(same.mean()),
        "num_tokens": len(divergences),
    }
    print(json.dumps(result), file=sys.stdout)


if __name__ == "__main__":
    main()
