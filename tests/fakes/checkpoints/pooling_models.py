"""Tiny random checkpoints that embed, rerank or classify, with the demo model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.numerics.tiny_models import make_hugging_face_model, save

VOCAB_SIZE = 4096  # of the demo model's tokenizer
HIDDEN_SIZE = 32
QUERY_PROMPT = "Find texts about: "
YES, NO = 1501, 1777
LABELS = {0: "bad", 1: "fair", 2: "good"}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TYPE, _BASE = "sentence_transformers.models", "sentence_transformers.base.modules"


def make_embedder(folder: Path, pooling: str = "lasttoken") -> Any:
    """Save a Qwen3 without head as sentence-transformers does; return transformers' model."""
    model = _save(folder, "Qwen3Model")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{_TYPE}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{_TYPE}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{_TYPE}.Normalize"},
    ]
    write_json(folder / "modules.json", modules)
    modes = {name: name.endswith(pooling) for name in (
        "pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens",
        "pooling_mode_lasttoken",
    )}  # fmt: skip
    sizes = {"word_embedding_dimension": HIDDEN_SIZE, "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", {**sizes, **modes})
    prompts = {"query": QUERY_PROMPT, "document": ""}
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    return model


def make_reranker(folder: Path) -> Any:
    """Save a Qwen3 whose logits of `YES` and `NO` are a score; return transformers' model."""
    model = _save(folder, "Qwen3ForCausalLM")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{_BASE}.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    write_json(folder / "modules.json", modules)
    ids = {"true_token_id": YES, "false_token_id": NO}
    write_json(folder / "1_LogitScore" / "config.json", ids)
    return model


def make_classifier(folder: Path, labels: dict[int, str] | None = None, **fields: Any) -> Any:
    """Save a Qwen3 with a head for labels; return transformers' model."""
    named = labels or LABELS
    label2id = {name: index for index, name in named.items()}
    fields |= {"id2label": named, "label2id": label2id}
    return _save(folder, "Qwen3ForSequenceClassification", **fields)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _save(folder: Path, architecture: str, **fields: Any) -> Any:
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, **fields}
    model = make_hugging_face_model(architecture, **sizes)
    save(model, folder)
    for name in _TOKENIZER:
        if (DEMO_MODEL / name).exists():
            shutil.copy(DEMO_MODEL / name, folder / name)
    return model
