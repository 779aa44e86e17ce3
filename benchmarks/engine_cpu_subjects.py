"""One engine in a process of its own: load a checkpoint, time what is asked for, print JSON.

Run by engine_cpu.py, perhaps with the Python of another environment, so nothing is imported before
it is needed. Refuses to know: the other engines, what the times are compared with.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 32  # of the prompts that decodes begin with
Prompts = Sequence[list[int]]
Generate = Callable[[Prompts, int], object]  # prompts (all of one length), tokens to make of each


def baton(folder: Path, threads: int, weights: str = "auto") -> Generate:
    """This engine, offline."""
    from baton.api.sampling_params import SamplingParams
    from engine import LLM

    llm = LLM(
        str(folder),
        dtype="float32",
        num_threads=threads,
        weights=weights,
        prefix_cache=False,
        max_num_batched_tokens=2048,
        kv_cache_bytes=2**29,
    )

    def generate(prompts: Prompts, num_tokens: int) -> object:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        return llm.generate(prompts, params)

    return generate


def baton_int8(folder: Path, threads: int) -> Generate:
    """This engine with int8 weights and inputs."""
    return baton(folder, threads, "int8")


def baton_int4(folder: Path, threads: int) -> Generate:
    """This engine with int4 weights and int8 inputs."""
    return baton(folder, threads, "int4")


def transformers(folder: Path, threads: int) -> Generate:
    """Hugging Face's generate with its default, dynamic cache."""
    import torch
    from transformers import AutoModelForCausalLM

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


def vllm(folder: Path, threads: int) -> Generate:
    """vLLM's CPU build, compiled."""
    import os

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=4096,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, num_tokens: int) -> object:
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=num_tokens, detokenize=False
        )
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


def onnxruntime(folder: Path, threads: int) -> Generate:
    """ONNX Runtime GenAI; the checkpoint is converted beside itself by its own builder."""
    import subprocess
    import sys

    converted = folder.parent / f"{folder.name}-onnx"
    if not (converted / "genai_config.json").exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        subprocess.run(
            [*builder, "-i", str(folder), "-o", str(converted), "-p", "fp32", "-e", "cpu"],
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


def openvino(folder: Path, threads: int) -> Generate:
    """OpenVINO GenAI's continuous batching; the checkpoint is converted beside itself."""
    import subprocess
    import sys

    converted = folder.parent / f"{folder.name}-openvino"
    if not (converted / "openvino_model.xml").exists():
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        export = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        subprocess.run(
            [*command, *export, "--model", str(folder), str(converted)],
            check=True,
            stdout=sys.stderr,
        )
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
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


SUBJECTS: dict[str, Callable[[Path, int], Generate]] = {
    "baton": baton,
    "baton int8": baton_int8,
    "baton int4": baton_int4,
    "transformers": transformers,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "vllm": vllm,
}


def measure(generate: Generate, case: str, num_tokens: int) -> float:
    """Tokens per second: ``prefill N`` of one prompt, ``decode B`` of B requests at a time."""
    kind, _, number = case.partition(" ")
    draw = random.Random(case)
    batch, length = (1, int(number)) if kind == "prefill" else (int(number), PROMPT_TOKENS)

    def seconds(new_tokens: int) -> float:
        prompts = [draw.choices(range(1000), k=length) for _ in range(batch)]
        start = time.perf_counter()
        generate(prompts, new_tokens)
        return time.perf_counter() - start

    seconds(2)
    if kind == "prefill":
        return length / seconds(1)
    first, all_tokens = seconds(1), seconds(1 + num_tokens)
    return batch * num_tokens / (all_tokens - first)


def main() -> None:
    """Load, measure every case, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", choices=SUBJECTS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="decode steps per case")
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    arguments: Any = parser.parse_args()
    generate = SUBJECTS[arguments.subject](arguments.model, arguments.threads)
    results = {
        case: max(measure(generate, case, arguments.tokens) for _ in range(arguments.repetitions))
        for case in arguments.cases
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
