"""Tiny random models whose tokenizers and chat templates have the marks of well-known families.

The templates are short: what matters is where a prompt ends, and how calls and thoughts are marked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.fakes.checkpoints.demo_model import DEMO_MODEL

VOCAB_SIZE = 4096  # of the demo model's tokenizer; marks come behind
_NUM_ROWS = 4160
_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_BEGIN = "<|im_start|>assistant\n"
_OFF = "{% if enable_thinking is defined and not enable_thinking %}"


@dataclass(frozen=True, slots=True)
class ThinkingFamily:
    """A family's marks and template.

    Attributes:
        marks: special tokens of the tokenizer.
        plain_marks: tokens of their own that are text.
        template: shows where a prompt ends, and has the signs of the family's forms.
        opens: the prompt opens the thought.
    """

    template: str
    marks: tuple[str, ...] = ()
    plain_marks: tuple[str, ...] = ()
    opens: bool = False


_THINK = ("<think>", "</think>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
FAMILIES = {
    # The model opens the thought by itself; calls are JSON between marks that are text.
    "qwen3": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + _OFF + "<think>\n\n</think>\n\n{% endif %}{# <tool_call> #}",
        plain_marks=(*_THINK, "<tool_call>", "</tool_call>"),
    ),
    # The prompt opens the thought, and no variable switches thoughts off.
    "deepseek_r1": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + "<think>\n{# <｜tool▁call▁begin｜> #}",
        marks=(*_THINK, *_DEEPSEEK),
        opens=True,
    ),
    # The variable `thinking` is off by default.
    "deepseek_v31": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + "{% if thinking %}<think>{% else %}</think>{% endif %}"
        "{# <｜tool▁sep｜>' + tool['function']['arguments'] #}",
        marks=(*_THINK, *_DEEPSEEK),
        opens=True,
    ),
    # Arguments are tags.
    "glm45": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + _OFF + "\n<think></think>{% endif %}{# <arg_key> #}",
        plain_marks=(
            *_THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>",
        ),
    ),
    "smollm3": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + _OFF + "<think>\n\n</think>\n{% endif %}{# <tool_call> #}",
        plain_marks=_THINK,
    ),
    "qwen3_coder": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + "<think>\n{# <function= </think> #}",
        plain_marks=(*_THINK, "<tool_call>", "</tool_call>"),
        opens=True,
    ),
    "seed_oss": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + "<seed:think>{# <seed:tool_call> #}",
        marks=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        opens=True,
    ),
    "kimi_k2": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + "<think>{# <|tool_call_argument_begin|> #}",
        marks=(
            *_THINK, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
            "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ),
        opens=True,
    ),
    "olmo3": ThinkingFamily(
        _TURNS + _TOOLS + _BEGIN + "<think>{# <function_calls> #}",
        plain_marks=_THINK,
        opens=True,
    ),
    "gpt_oss": ThinkingFamily(
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        + _TOOLS + "<|start|>assistant{# <|channel|> {{ reasoning_effort }} #}",
        marks=(
            "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>",
            "<|call|>",
        ),
    ),
}  # fmt: skip


def write_thinking_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Fill a folder with a random model of two small layers, and a family's tokenizer."""
    described = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    row = FAMILIES[family]
    plain = described["added_tokens"][0]
    described["added_tokens"] += [
        {**plain, "id": VOCAB_SIZE + index, "content": mark, "special": mark in row.marks}
        for index, mark in enumerate((*row.marks, *row.plain_marks))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(row.template, encoding="utf-8")
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    config.update(
        hidden_size=32, intermediate_size=48, head_dim=16, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=2, layer_types=["full_attention"] * 2,
        vocab_size=_NUM_ROWS, max_position_embeddings=2048, dtype="float32",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(config, np.random.default_rng(seed)), folder / "model.safetensors")
    return folder


def _weights(
    config: dict[str, int], rng: np.random.Generator
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_NUM_ROWS, hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, shape in {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, heads),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"{name}.{part}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
