"""The table of cases in which a split system is compared with one process; test files pick rows.

Refuses to know: how the outputs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.gguf_files import write_model
from tests.numerics.family_checkpoints import FAMILIES, LATENTS, richest_variants
from tests.numerics.family_hybrids import HYBRIDS
from tests.numerics.tiny_models import make_hugging_face_model, save

# Engine options by the numbers that weights and KV are stored in.
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8 weights": {"dtype": "bfloat16", "weights": "int8"},
    "int4 weights": {"dtype": "bfloat16", "weights": "int4"},
    "fp8 weights": {"dtype": "bfloat16", "weights": "fp8"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
# Architecture, variant, block size. States travel where blocks end: hybrids also have blocks as
# long as a chunk of 16 tokens, and blocks in which chunks end.
FAMILY_CASES = [
    (architecture, variant, block_size)
    for architecture, variant in richest_variants()
    for block_size in ((4, 16, 12) if architecture in HYBRIDS else (4,))
]
# Families of chat templates that think, and that call tools in drawn forms.
THINKING_FAMILIES = ("qwen3", "deepseek_r1", "gpt_oss")
FORM_FAMILIES = ("qwen3", "glm45", "gpt_oss")

DEMO_TOKEN_NUMBERS = 6 * 2 * 2 * 64  # in KV, of the demo model: layers, K and V, heads, head size
FLOAT32_BYTES = 4
# Tensor-parallel size, stages, and the stages' layers if not equal.
Ranks = tuple[int, int] | tuple[int, int, str]


def rank_args(ranks: Ranks) -> list[str]:
    """Return the arguments of a node with so many ranks."""
    sizes = "--tensor-parallel-size", str(ranks[0]), "--pipeline-parallel-size", str(ranks[1])
    return [*sizes, *(["--pipeline-layers", ranks[2]] if len(ranks) > 2 else [])]


def demo_model(_: Path) -> Path:
    """Return the demo model's folder."""
    return DEMO_MODEL


@dataclass(frozen=True, kw_only=True)
class SplitCase:
    """A model and settings with which a split system gives the tokens of one process.

    Attributes:
        make: writes the model below a folder and returns its path.
        vocabulary: size of the model's vocabulary.
        num_prompts, longest: number of prompts, and about the tokens of the longest.
        chunk: tokens of a prompt that a node computes at once.
        options: engine options of one process and of both nodes.
        node_args: further arguments of both nodes; they change no token.
        prefill, decode: ranks of the nodes.
        window: tokens that every other layer sees; 0: all layers see all tokens.
        token_bytes: bytes of KV per token; 0: not compared.
        may_preempt: whether nodes may lack memory, so that requests start again.
        is_lengthy: whether the case is left out where minutes count.
    """

    name: str
    make: Callable[[Path], Path] = demo_model
    vocabulary: int = 4096
    num_prompts: int = 8
    longest: int = 420
    chunk: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    node_args: Sequence[str] = ()
    prefill: Ranks = (1, 1)
    decode: Ranks = (1, 1)
    window: int = 0
    token_bytes: int = DEMO_TOKEN_NUMBERS * FLOAT32_BYTES
    may_preempt: bool = False
    is_lengthy: bool = False

    @property
    def block_size(self) -> int:
        return int(self.options.get("block_size", 16))

    @property
    def has_ranks(self) -> bool:
        return (self.prefill, self.decode) != ((1, 1), (1, 1))

    def arguments(self) -> list[str]:
        """Return the arguments of both nodes."""
        found = ["--long-prefill-token-threshold", str(self.chunk), "--kv-cache-memory", "32M"]
        for name, value in self.options.items():
            found += [f"--{name.replace('_', '-')}", str(value)]
        return [*found, *self.node_args]

    def prompts(self) -> list[list[int]]:
        """Return prompts of 1 to about ``longest`` tokens; no two begin with the same token."""
        num_usual = self.vocabulary - 3  # the first ones begin and end texts
        return [
            [
                3 + (7 * i * i + 3 * i + 5 * k) % num_usual
                for i in range(1 + k * self.longest // self.num_prompts)
            ]
            for k in range(self.num_prompts)
        ]

    def num_sent_blocks(self, num_tokens: int) -> int:
        """Count the blocks that travel for a prompt if the decode node has no part of it."""
        num_blocks = -(-num_tokens // self.block_size)
        if not self.window:
            return num_blocks
        return 2 * num_blocks - max(num_tokens - self.window + 1, 0) // self.block_size


def _make_two_windows(folder: Path) -> Path:
    model = make_hugging_face_model(
        "Qwen3ForCausalLM",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=20,
        use_sliding_window=True,
        max_position_embeddings=400,
        initializer_range=0.5,
    )
    return save(model, folder)


def _make_latents(folder: Path) -> Path:
    shape = FAMILIES["DeepseekV3ForCausalLM"].variants["groups, YaRN"]
    return save(make_hugging_face_model("DeepseekV3ForCausalLM", **shape), folder)


def _make_experts(folder: Path) -> Path:
    shape = {"num_experts": 5, "max_position_embeddings": 200, "initializer_range": 0.5}
    return save(make_hugging_face_model("Qwen2MoeForCausalLM", **shape), folder)


def _make_gguf(folder: Path) -> Path:
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    model = make_hugging_face_model("Qwen3ForCausalLM", **shape)
    return write_model(folder / "model.gguf", model, gguf.GGMLQuantizationType.Q4_0)


_FP8_KV: dict[str, Any] = {
    "options": {"kv_cache_dtype": "fp8"},
    "node_args": ["--kv-digests"],
    "token_bytes": DEMO_TOKEN_NUMBERS,
}
_BY_HEADS = ("--kv-layout", "heads")
_EXPERTS: dict[str, Any] = {
    "make": _make_experts,
    "vocabulary": 61,
    "longest": 100,
    "chunk": 16,
    "options": {"block_size": 4},
    "node_args": ["--expert-parallel", "on"],
    "token_bytes": 2 * 2 * 2 * 8 * FLOAT32_BYTES,
}
_FEW: dict[str, Any] = {"num_prompts": 4, "longest": 160}

SPLIT_CASES = (
    SplitCase(
        name="layers with and without a window",
        make=_make_two_windows,
        vocabulary=61,
        num_prompts=20,
        longest=190,
        chunk=32,
        options={"block_size": 4},
        node_args=["--num-blocks", "450"],
        window=20,
        token_bytes=0,
        may_preempt=True,
    ),
    SplitCase(
        name="latents",
        make=_make_latents,
        vocabulary=61,
        longest=40,
        chunk=16,
        options={"block_size": 4},
        node_args=["--no-prefix-cache"],
        token_bytes=(LATENTS["kv_lora_rank"] + LATENTS["qk_rope_head_dim"]) * 3 * FLOAT32_BYTES,
    ),
    SplitCase(name="fp8 cache", **_FP8_KV),
    SplitCase(name="fp8 cache, two stages prefill", prefill=(1, 2), **_FP8_KV),
    SplitCase(name="int4 weights", options={"weights": "int4"}),
    SplitCase(
        name="GGUF",
        make=_make_gguf,
        vocabulary=64,
        longest=40,
        chunk=16,
        options={"weights": "auto"},
        token_bytes=2 * 2 * 2 * 32 * FLOAT32_BYTES,
    ),
    SplitCase(name="2 ranks to 1", prefill=(2, 1), node_args=["--kv-digests"], **_FEW),
    SplitCase(name="1 to 2", decode=(2, 1), **_FEW),
    SplitCase(
        name="2 stages to 2 ranks",
        prefill=(1, 2),
        decode=(2, 1),
        node_args=["--kv-digests"],
        **_FEW,
    ),
    SplitCase(
        name="2 ranks to 1 by heads", prefill=(2, 1), node_args=[*_BY_HEADS, "--kv-digests"], **_FEW
    ),
    SplitCase(name="1 to 2 by heads", decode=(2, 1), node_args=_BY_HEADS, is_lengthy=True, **_FEW),
    SplitCase(name="1 to 1 by heads", node_args=_BY_HEADS, is_lengthy=True, **_FEW),
    SplitCase(name="4 ranks to 2", prefill=(4, 1), decode=(2, 1), is_lengthy=True, **_FEW),
    SplitCase(name="2 ranks to 2 stages", prefill=(2, 1), decode=(1, 2), is_lengthy=True, **_FEW),
    SplitCase(name="2 stages of 2 to 1", prefill=(2, 2), is_lengthy=True, **_FEW),
    SplitCase(name="experts by rank, 1 to 2", decode=(2, 1), **_EXPERTS),
    SplitCase(
        name="experts by rank, 4 to 2 stages of 2",
        prefill=(4, 1),
        decode=(2, 2),
        is_lengthy=True,
        **_EXPERTS,
    ),
    SplitCase(
        name="4 + 2 to 3 + 2 + 1 layers",
        prefill=(1, 2, "4,2"),
        decode=(1, 3, "3,2,1"),
        is_lengthy=True,
        **_FEW,
    ),
)
