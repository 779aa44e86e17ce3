"""Time llama.cpp with adapters in this process, and print JSON that adapters.py reads.

Run this with the Python of llama.cpp's environment. A llama.cpp context has one set of adapters at
a time, so a step of requests with different adapters takes one call per adapter, as in llama.cpp's
server. Refuses to know: Baton.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as api

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.engine_cpu.adapters import rates_of
from benchmarks.engine_cpu.gguf_checkpoints import as_gguf
from benchmarks.engine_cpu.llamacpp_batch import decode_batch

Prompts = Sequence[list[int]]


class Model:
    """A llama.cpp model with adapters, and a context for eight requests.

    Args:
        folder: the checkpoint, beside which its GGUF file is written.
        adapters: folders with an ``adapter_model.gguf`` each.
    """

    def __init__(self, folder: Path, adapters: Path, threads: int) -> None:
        self._vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        api.llama_backend_init()
        path = as_gguf(folder, "bf16")
        loading = api.llama_model_default_params()
        model = api.llama_model_load_from_file(str(path).encode(), loading)
        files = [one / "adapter_model.gguf" for one in sorted(adapters.iterdir())]
        self._adapters = [api.llama_adapter_lora_init(model, str(one).encode()) for one in files]
        assert all(self._adapters), "an adapter cannot be read"
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = 8 * 640, 2048, 8
        options.n_threads = options.n_threads_batch = threads
        self._context: Any = api.llama_init_from_model(model, options)

    def generate(self, prompts: Prompts, num_tokens: int, adapted: bool) -> object:
        """Continue prompts of equal length, each with its adapter or all with the base model."""
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        tokens = self._step(prompts, 0, adapted)
        for made in range(1, num_tokens):
            tokens = self._step(tokens, len(prompts[0]) + made - 1, adapted)
        return tokens

    def _step(self, tokens: Prompts, position: int, adapted: bool) -> list[list[int]]:
        """Compute each request's tokens from ``position`` on; return each request's next token."""
        found: dict[int, list[int]] = {}
        for adapter, requests in self._groups(len(tokens), adapted):
            found |= self._decode(adapter, {one: tokens[one] for one in requests}, position)
        return [found[one] for one in range(len(tokens))]

    def _groups(self, num_requests: int, adapted: bool) -> Iterator[tuple[Any, range]]:
        """Yield each adapter with the indexes of its requests; None: the base model, for all."""
        if not adapted:
            yield None, range(num_requests)
            return
        for index, adapter in enumerate(self._adapters):
            yield adapter, range(index, num_requests, len(self._adapters))

    def _decode(
        self, adapter: Any, tokens: dict[int, list[int]], position: int
    ) -> dict[int, list[int]]:
        chosen = [] if adapter is None else [adapter]
        pointers = (api.llama_adapter_lora_p_ctypes * len(chosen))(*chosen)
        scales = (ctypes.c_float * len(chosen))(*[1.0] * len(chosen))
        failed = api.llama_set_adapters_lora(self._context, pointers, len(chosen), scales)
        assert not failed, failed
        return decode_batch(self._context, tokens, position, self._vocabulary)


def main() -> None:
    """Load the model, time base model and adapters, print one line of JSON."""
    folder, adapters, threads, rounds, tokens = sys.argv[1:]
    model = Model(Path(folder), Path(adapters), int(threads))
    print(json.dumps(rates_of(model.generate, int(rounds), int(tokens))))


if __name__ == "__main__":
    main()
