"""Time one engine in its own process: load a checkpoint, time the given cases, print JSON.

`engine_cpu.py` runs this script, often with the Python of another engine's environment, so each
function imports only the packages of its engine. Refuses to know: comparisons.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 32  # number of tokens of each prompt in a decode case
Prompts = Sequence[list[int]]
# arguments: prompts of equal length, number of output tokens of each
Generate = Callable[[Prompts, int], object]


def baton(folder: Path, threads: int, weights: str) -> Generate:
    """Load Baton's engine in this process, in the checkpoint's dtype.

    With int8 and int4 weights, the engine also rounds the inputs of products. GGUF weights (such as
    q8_0) are read from the file that the measurement of llama.cpp has written.
    """
    from baton.api.sampling_params import SamplingParams
    from engine import LLM

    config = json.loads((folder / "config.json").read_text())
    is_gguf = weights.startswith("q")
    llm = LLM(
        f"{folder}-{weights}.gguf" if is_gguf else str(folder),
        dtype=config.get("dtype") or config["torch_dtype"],
        num_threads=threads,
        weights="auto" if is_gguf else weights or "auto",
        prefix_cache=False,
        max_num_batched_tokens=2048,
        kv_cache_bytes=2**30 + 2**28,
    )

    def generate(prompts: Prompts, num_tokens: int) -> object:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        return llm.generate(prompts, params)

    return generate


def transformers(folder: Path, threads: int, weights: str) -> Generate:
    """Load a model for `generate` of `transformers`, with its default KV cache, which grows."""
    import torch
    from transformers import AutoModelForCausalLM

    assert not weights, weights
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompts: Prompts, num_tokens: int) -> object:
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )

    return generate


def vllm(folder: Path, threads: int, weights: str) -> Generate:
    """Load vLLM's CPU build, with compilation."""
    import os

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        dtype="bfloat16" if weights == "bf16" else "float32",
        skip_tokenizer_init=True,
        max_model_len=16384,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, num_tokens: int) -> object:
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=num_tokens, detokenize=False
        )
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


def onnxruntime(folder: Path, threads: int, weights: str) -> Generate:
    """Load ONNX Runtime GenAI, whose builder converts the checkpoint into another folder."""
    import subprocess
    import sys

    weights = weights or "fp32"
    converted = folder.parent / f"{folder.name}-onnx-{weights}"
    if not (converted / "genai_config.json").exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        subprocess.run(
            [*builder, "-i", str(folder), "-o", str(converted), "-p", weights, "-e", "cpu"],
            check=True,
            stdout=sys.stderr,
        )
    path = converted / "genai_config.json"
    config = json.loads(path.read_text())
    session = config["model"]["decoder"]["session_options"]
    session["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config))
    import numpy as np
    import onnxruntime_genai as og

    model = og.Model(str(converted))

    def generate(prompts: Prompts, num_tokens: int) -> object:
        params = og.GeneratorParams(model)
        length = len(prompts[0]) + num_tokens
        params.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False
        )
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        for _ in range(num_tokens):
            generator.generate_next_token()
        return generator.get_sequence(0)

    return generate


def openvino(folder: Path, threads: int, weights: str) -> Generate:
    """Load OpenVINO GenAI with continuous batching; convert the checkpoint before."""
    import subprocess
    import sys

    # int8 and int4 weights are widened, because products are computed in bfloat16.
    kept = {"": "fp32", "bf16": "fp16"}.get(weights, weights)
    precision = "bf16" if weights else "f32"
    converted = folder.parent / f"{folder.name}-openvino-{kept}"
    if not (converted / "openvino_model.xml").exists():
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        export = ["--task", "text-generation-with-past", "--weight-format", kept]
        subprocess.run(
            [*command, *export, "--model", str(folder), str(converted)],
            check=True,
            stdout=sys.stderr,
        )
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    pipeline = genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU", options)

    def generate(prompts: Prompts, num_tokens: int) -> object:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            pipeline.add_request(index, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [handle.read_all() for handle in handles]

    return generate


def llamacpp(folder: Path, threads: int, weights: str) -> Generate:
    """Load llama.cpp, built for this CPU; convert the checkpoint to a GGUF file before."""
    import llama_cpp as api

    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from benchmarks.engine_cpu.gguf_checkpoints import as_gguf
    from benchmarks.engine_cpu.llamacpp_batch import decode_batch

    path = as_gguf(folder, weights)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    api.llama_backend_init()
    loading = api.llama_model_default_params()
    model = api.llama_model_load_from_file(str(path).encode(), loading)
    contexts: dict[int, Any] = {}

    def context_of(batch: int) -> Any:
        if batch not in contexts:
            options = api.llama_context_default_params()
            options.n_ctx = 8704 if batch == 1 else batch * 256
            # Tokens per call; llama.cpp itself splits them into parts of 512
            options.n_batch = 8704
            options.n_seq_max = batch
            options.n_threads = options.n_threads_batch = threads
            contexts[batch] = api.llama_init_from_model(model, options)
        return contexts[batch]

    def step(context: Any, tokens: Prompts, position: int) -> list[list[int]]:
        """Compute each request's tokens from ``position`` on; return each request's next token."""
        found = decode_batch(context, dict(enumerate(tokens)), position, vocabulary)
        return [found[request] for request in range(len(tokens))]

    def generate(prompts: Prompts, num_tokens: int) -> object:
        context = context_of(len(prompts))
        api.llama_memory_clear(api.llama_get_memory(context), True)
        tokens = step(context, prompts, 0)
        for made in range(1, num_tokens):
            tokens = step(context, tokens, len(prompts[0]) + made - 1)
        return tokens

    return generate


SUBJECTS: dict[str, Callable[[Path, int, str], Generate]] = {
    "baton": baton,
    "transformers": transformers,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "vllm": vllm,
    "llamacpp": llamacpp,
}


def measure(generate: Generate, case: str, num_tokens: int) -> float:
    """Measure a case's tokens per second.

    ``prefill N`` has one prompt of N tokens; ``decode B`` has B requests.

    A first run, which is not counted, warms up. In this run, long prompts are cut short to save
    minutes.
    """
    kind, _, number = case.partition(" ")
    draw = random.Random(case)
    batch, length = (1, int(number)) if kind == "prefill" else (int(number), PROMPT_TOKENS)

    def seconds(new_tokens: int, length: int = length) -> float:
        prompts = [draw.choices(range(1000), k=length) for _ in range(batch)]
        start = time.perf_counter()
        generate(prompts, new_tokens)
        return time.perf_counter() - start

    seconds(2, min(length, 2048))
    if kind == "prefill":
        return length / seconds(1)
    first, all_tokens = seconds(1), seconds(1 + num_tokens)
    return batch * num_tokens / (all_tokens - first)


def main() -> None:
    """Load an engine, measure every case, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", required=True, help="an engine, perhaps with its weights")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="decode steps per case")
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    arguments: Any = parser.parse_args()
    engine, _, weights = arguments.subject.partition(" ")
    generate = SUBJECTS[engine](arguments.model, arguments.threads, weights)
    results: dict[str, float | str] = {}
    for case in arguments.cases:
        rounds = range(arguments.repetitions)
        try:
            results[case] = max(measure(generate, case, arguments.tokens) for _ in rounds)
        except Exception as error:  # an engine may refuse one case; time the other cases
            results[case] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
