"""Makes models of real shapes with random weights on the device, and requests for them.

Use these models only for figures that depend on shapes alone. Refuses to know: what is measured.
"""

from __future__ import annotations

import json
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import engine.worker.worker
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.weights_cache import WeightsCache
from baton.engine_config import EngineConfig
from baton_kernels.ops import Ops
from engine.core.request import Request
from engine.engine import Engine
from engine.make_engine import make_engine as make_from_folder
from models.base import CausalLM
from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.loading.loader import WeightPacker, pack_loaded
from models.parallel.group import ALONE, Ranks

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151_936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "0.6B": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": {
        **_COMMON,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def make_engine(shape: str, device: str, **options: Any) -> Engine:
    """Make an engine with a model of `SHAPES`; ``options``: fields of `EngineConfig`."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(SHAPES[shape])
        Path(folder, "config.json").write_text(config, encoding="utf-8")
        with mock.patch.object(engine.worker.worker, "load_model", _load):
            return make_from_folder(Path(folder), EngineConfig(device=device, **options))


def make_request(
    name: str, prompt: list[int], engine: Engine, max_tokens: int, temperature: float = 0.0
) -> Request:
    """Make a request that ends only when it has ``max_tokens`` output tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    return Request.create(
        name,
        prompt,
        params,
        seed=zlib.crc32(name.encode()),
        eos_token_ids=engine.eos_token_ids,
        max_model_len=engine.max_model_len,
    )


def add_decoding(engine: Engine, batch: int, context: int, max_tokens: int) -> None:
    """Add requests whose prompts count as computed, though their KV is all zeros."""
    draw = random.Random(0)
    for row in range(batch):
        prompt = [draw.randrange(2, 500) for _ in range(context)]
        request = make_request(f"{engine.num_steps}-{row}", prompt, engine, max_tokens)
        engine.park(request)
        if engine.grant(request.request_id) is None:
            raise RuntimeError(f"num_blocks: too few for {batch} requests of {context} tokens")
        engine.commit(request.request_id, 2)


def _load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    packer: WeightPacker | None = None,
    ops: Ops | None = None,
    ranks: Ranks = ALONE,
    cache: WeightsCache | None = None,
    images: bool = False,
) -> CausalLM:
    """Make a model with random weights for a single rank, in place of `load_model`."""
    if ranks.everyone.size > 1 or ops is not None or images:
        raise ValueError("ranks, ops, images: shapes of this suite are one process's text models")
    config = ModelConfig.from_folder(Path(folder), max_model_len=max_model_len)
    with torch.device("meta"):
        model = DecoderForCausalLM(config)
    torch.manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.ones(parameter.shape, dtype=dtype, device=device)
            if weight.ndim > 1:
                weight.normal_(std=0.02)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
    if packer is not None:
        pack_loaded(packer, model)
    return model.to(torch.device(device)).eval()
