"""Drafters draft what plain torch computes from their weights and the whole text.

This holds for prompts in chunks, cached prefixes, drafts that were right or wrong, and steps
without drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.core.request import Request
from engine.worker.drafting import layers
from tests.fakes.engine.drafters import drafter_folder
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.medium

NUM_DRAFTS = 4
DraftByHand = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = make_hugging_face_model(
        "Qwen3ForCausalLM",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=7,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return save(model, tmp_path_factory.mktemp("model"))


class Teacher:
    """The model by `transformers`."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config

    @torch.no_grad()
    def states(self, token_ids: list[int], *layers: int) -> Tensor:
        """`[num_tokens, hidden_size]` behind the last norm, or before some layers."""
        found = self.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        if not layers:
            return cast("Tensor", found[-1][0])
        return torch.cat([found[layer][0] for layer in layers], -1)

    def embed(self, token_ids: list[int]) -> Tensor:
        return cast("Tensor", self.model.get_input_embeddings()(torch.tensor(token_ids)))

    def logits(self, states: Tensor) -> Tensor:
        return cast("Tensor", self.model.lm_head(states))


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def attend(x: Tensor, weights: dict[str, Tensor], config: Any) -> Tensor:
    """Causal attention over `[num_tokens, width]`."""
    size, positions = config.head_dim, torch.arange(len(x))
    query, key, value = (
        (x @ weights[f"self_attn.{name}.weight"].T).view(len(x), -1, size).transpose(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if "self_attn.q_norm.weight" in weights:
        query = norm(query, weights["self_attn.q_norm.weight"])
        key = norm(key, weights["self_attn.k_norm.weight"])
    theta = config.rope_parameters["rope_theta"]
    angles = positions[:, None] * theta ** -(torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))

    def turned(one: Tensor) -> Tensor:
        first, second = one.chunk(2, -1)
        return one * cos + torch.cat([-second, first], -1) * sin

    attended = F.scaled_dot_product_attention(
        turned(query)[None], turned(key)[None], value[None], is_causal=True, enable_gqa=True
    )[0]
    return attended.transpose(0, 1).flatten(1) @ weights["self_attn.o_proj.weight"].T


def feed_forward(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    gate, up = (x @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def layer(x: Tensor, weights: dict[str, Tensor], config: Any) -> Tensor:
    before = weights.get("input_layernorm.weight")
    x = x + attend(x if before is None else norm(x, before), weights, config)
    return x + feed_forward(norm(x, weights["post_attention_layernorm.weight"]), weights)


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def go_on(
    teacher: Teacher,
    token_ids: list[int],
    states: Tensor,
    num_drafts: int,
    compute: Callable[[Tensor, Tensor], Tensor],
    choose: Callable[[Tensor], int],
) -> list[int]:
    """Draft one token after the other, computing all positions for each."""
    text, drafts = list(token_ids), list[int]()
    for _ in range(num_drafts):
        found = compute(teacher.embed(text[1:]), states)
        drafts.append(choose(found[-1]))
        text.append(drafts[-1])
        states = torch.cat([states, found[-1:]])
    return drafts


def eagle_by_hand(teacher: Teacher, drafter: Path) -> DraftByHand:
    weights = load_file(drafter / "model.safetensors")

    def compute(embedded: Tensor, states: Tensor) -> Tensor:
        joined = torch.cat([embedded, states], -1) @ weights["fc.weight"].T
        return layer(joined, below(weights, "layers.0."), teacher.config)

    def draft(text: list[int], num_drafts: int) -> list[int]:
        states = teacher.states(text[:-1])
        return go_on(teacher, text, states, num_drafts, compute,
                     lambda found: int(teacher.logits(found).argmax()))  # fmt: skip

    return draft


def mtp_by_hand(teacher: Teacher, drafter: Path) -> DraftByHand:
    weights = below(load_file(drafter / "model.safetensors"), "mtp.")

    def compute(embedded: Tensor, states: Tensor) -> Tensor:
        embedded = norm(embedded, weights["pre_fc_norm_embedding.weight"])
        states = norm(states, weights["pre_fc_norm_hidden.weight"])
        joined = torch.cat([embedded, states], -1) @ weights["fc.weight"].T
        found = layer(joined, below(weights, "layers.0."), teacher.config)
        return norm(found, weights["norm.weight"])

    def draft(text: list[int], num_drafts: int) -> list[int]:
        states = teacher.states(text[:-1])
        return go_on(teacher, text, states, num_drafts, compute,
                     lambda found: int(teacher.logits(found).argmax()))  # fmt: skip

    return draft


def eagle_3_by_hand(teacher: Teacher, drafter: Path) -> DraftByHand:
    weights = load_file(drafter / "model.safetensors")
    own = below(weights, "midlayer.")

    def compute(embedded: Tensor, states: Tensor) -> Tensor:
        embedded = norm(embedded, own["input_layernorm.weight"])
        joined = [embedded, norm(states, own["hidden_norm.weight"])]
        x = states + attend(torch.cat(joined, -1), own, teacher.config)
        return x + feed_forward(norm(x, own["post_attention_layernorm.weight"]), own)

    def choose(found: Tensor) -> int:
        place = int((norm(found, weights["norm.weight"]) @ weights["lm_head.weight"].T).argmax())
        return place + int(weights["d2t"][place])

    def draft(text: list[int], num_drafts: int) -> list[int]:
        states = teacher.states(text[:-1], 2, 3, 4) @ weights["fc.weight"].T
        return go_on(teacher, text, states, num_drafts, compute, choose)

    return draft


def medusa_by_hand(teacher: Teacher, drafter: Path) -> DraftByHand:
    weights = load_file(drafter / "model.safetensors")

    def draft(text: list[int], num_drafts: int) -> list[int]:
        state = teacher.states(text[:-1])[-1]
        drafts = []
        for head in range(num_drafts):
            own = below(weights, f"{head}.0.linear.")
            moved = state + F.silu(state @ own["weight"].T + own["bias"])
            drafts.append(int(teacher.logits(moved).argmax()))
        return drafts

    return draft


def draft_model_by_hand(teacher: Teacher, drafter: Path) -> DraftByHand:
    smaller = Teacher(drafter)

    def draft(text: list[int], num_drafts: int) -> list[int]:
        known = list(text)
        for _ in range(num_drafts):
            known.append(int(smaller.logits(smaller.states(known)[-1]).argmax()))
        return known[len(text) :]

    return draft


def eagle_3_folder(folder: Path, to: Path) -> Path:
    """Make an EAGLE-3 checkpoint as its authors write one, with a head of 50 tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(8)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    width, inner, kv = 64, 96, 64
    tensors = {
        "fc.weight": random(width, 3 * width),
        "norm.weight": 1 + random(width),
        "lm_head.weight": random(50, width),
        "midlayer.input_layernorm.weight": 1 + random(width),
        "midlayer.hidden_norm.weight": 1 + random(width),
        "midlayer.post_attention_layernorm.weight": 1 + random(width),
        "midlayer.self_attn.q_proj.weight": random(128, 2 * width),
        "midlayer.self_attn.k_proj.weight": random(kv, 2 * width),
        "midlayer.self_attn.v_proj.weight": random(kv, 2 * width),
        "midlayer.self_attn.o_proj.weight": random(width, 128),
        "midlayer.mlp.gate_proj.weight": random(inner, width),
        "midlayer.mlp.up_proj.weight": random(inner, width),
        "midlayer.mlp.down_proj.weight": random(width, inner),
        "d2t": torch.arange(50) // 2,
        "t2d": torch.zeros(96, dtype=torch.bool),
    }
    (to / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLMEagle3"],
                    "num_hidden_layers": 1, "draft_vocab_size": 50})
    )  # fmt: skip
    save_file(tensors, to / "model.safetensors")
    return to


def drafts_of(
    llm: LLM, prompts: list[list[int]], num_tokens: int, pause: int
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Return all drafts of some requests' steps, each with the text before it.

    Args:
        pause: steps without drafts behind each step with drafts.
    """
    engine, found = llm.engine, []
    after_step = engine.features.speculation.after_step  # type: ignore[union-attr]

    def note(result: Any, requests: dict[str, Request], proposed: Any) -> Any:
        for request_id, drafts in proposed.items():
            if request_id in requests:
                found.append((list(requests[request_id].token_ids), drafts))
        return after_step(result, requests, proposed)

    engine.features.speculation.after_step = note  # type: ignore[union-attr, method-assign]
    engine.features.speculation.num_to_draft = (  # type: ignore[union-attr, method-assign]
        lambda num_rows, can_draft: 0 if engine.num_steps % (pause + 1) else NUM_DRAFTS
    )
    llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
    return found


BY_HAND = {
    "draft_model": draft_model_by_hand,
    "medusa": medusa_by_hand,
    "eagle": eagle_by_hand,
    "eagle 3": eagle_3_by_hand,
    "mtp": mtp_by_hand,
}


@pytest.mark.parametrize("pause", [0, 4])
@pytest.mark.parametrize("kind", BY_HAND)
def test_drafts_are_those_of_plain_torch(
    kind: str, pause: int, folder: Path, tmp_path: Path
) -> None:
    method = "eagle" if kind == "eagle 3" else kind
    drafter = (
        eagle_3_folder(folder, tmp_path) if kind == "eagle 3" else drafter_folder(method, folder)
    )
    llm = LLM(
        str(folder),
        num_threads=1,
        block_size=4,
        num_blocks=120,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=11,
        speculative_method=method,
        speculative_model=str(drafter),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive_speculation=False,
    )
    draft = BY_HAND[kind](Teacher(folder), drafter)
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, 96, (length,), generator=generator).tolist() for length in (1, 9, 30)
    ]
    found = drafts_of(llm, prompts, 40 if pause else 14, pause)
    assert len(found) > 20
    num_alike = 0
    with torch.no_grad():
        for text, drafts in found:
            assert len(drafts) <= NUM_DRAFTS
            num_alike += tuple(draft(text, len(drafts))) == drafts
    # Two logits that nearly tie may change places.
    assert num_alike >= 0.95 * len(found), (num_alike, len(found))


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "mtp"])
def test_a_prefix_without_drafter_kv_is_read_before_drafting(kind: str, folder: Path) -> None:
    """Check a prompt whose cached blocks hold no KV of the drafter."""
    drafter = drafter_folder(kind, folder)
    llm = LLM(
        str(folder),
        num_threads=1,
        block_size=4,
        num_blocks=160,
        speculative_method=kind,
        speculative_model=str(drafter),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive_speculation=False,
    )
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 96, (30,), generator=generator).tolist() for _ in range(3)]
    speculation: Any = llm.engine.features.speculation
    speculation.num_to_read = lambda: 0
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = [list(output.token_ids) for output in llm.generate(prompts, params)]
    assert llm.metrics().draft_steps_total == 0
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    cached = llm.generate(texts, params)
    assert llm.metrics().cached_prompt_tokens_total == 3 * 40, "without drafts all is found"
    speculation.num_to_read = lambda: 3
    found = drafts_of(llm, texts, 24, 0)
    assert llm.metrics().cached_prompt_tokens_total == 3 * 40, "nothing that was not read"
    draft = BY_HAND[kind](Teacher(folder), drafter)
    with torch.no_grad():
        num_alike = sum(tuple(draft(text, len(drafts))) == drafts for text, drafts in found)
    assert len(found) > 20
    assert num_alike >= 0.95 * len(found), (num_alike, len(found))
    again = llm.generate(texts, params)
    assert llm.metrics().cached_prompt_tokens_total == 6 * 40, "read by now"
    assert [one.token_ids for one in again] == [one.token_ids for one in cached]


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "mtp", "medusa"])
def test_it_drafts_up_to_the_longest_sequence(kind: str, folder: Path) -> None:
    llm = LLM(
        str(folder),
        num_threads=1,
        block_size=4,
        num_blocks=120,
        max_model_len=41,
        speculative_method=kind,
        speculative_model=str(drafter_folder(kind, folder)),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive_speculation=False,
    )
    prompts = [list(range(3, 3 + length)) for length in (30, 33, 39)]
    params = SamplingParams(max_tokens=41, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [len(one.token_ids) for one in outputs] == [11, 8, 2]
    assert llm.metrics().draft_steps_total > 0


def test_as_many_are_drafted_as_there_are_heads(folder: Path, tmp_path: Path) -> None:
    heads = load_file(drafter_folder("medusa", folder) / "model.safetensors")
    few = {name: one for name, one in heads.items() if name.startswith(("0.", "1."))}
    save_file(few, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    options: dict[str, Any] = {"num_threads": 1, "block_size": 4, "num_blocks": 120}
    options |= {"speculative_method": "medusa", "speculative_model": str(tmp_path)}
    llm = LLM(str(folder), **options, adaptive_speculation=False)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=14, temperature=0, ignore_eos=True))
    metrics = llm.metrics()
    assert metrics.draft_steps_total < metrics.drafts_total <= 2 * metrics.draft_steps_total
    with pytest.raises(ConfigError, match=r"^num_speculative_tokens: at most 2, .* got 3$"):
        LLM(str(folder), **options, num_speculative_tokens=3)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_after_more_steps_than_are_kept_it_drafts_all_the_same(
    method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MAX_UNREAD", 3)
    options: dict[str, Any] = {"num_threads": 1, "block_size": 4, "num_blocks": 120}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    [expected] = LLM(str(folder), **options).generate([[5, 6, 7]], params)
    llm = LLM(
        str(folder),
        speculative_method=method,
        speculative_model=str(drafter_folder(method, folder)),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive_speculation=False,
        **options,
    )
    found = drafts_of(llm, [[5, 6, 7]], 40, 8)
    assert len(found) > 3
    assert all(len(drafts) == NUM_DRAFTS for _, drafts in found[:-1])
    assert list(expected.token_ids)[: len(found[-1][0]) - 3] == found[-1][0][3:]
