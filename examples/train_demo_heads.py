"""Train drafters for the demo model on a CPU: Medusa heads, one EAGLE layer, one MTP layer.

The drafters draft the demo model's next tokens (docs/speculation.md). Each learns the distributions
that the demo model itself predicts, both on the model's training text and on texts that the model
has written, because drafters are used on the model's output. EAGLE and MTP also learn to continue
from their own drafts. The results are folders in the drafters' usual layouts, in bfloat16::

    python examples/train_demo_heads.py
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo_model import (
    Batches,
    Corpus,
    collect_sources,
    encode_chats,
    encode_documents,
    encode_in_pieces,
    learning_rate_factor,
    split_sources,
)
from transformers import Qwen3ForCausalLM

from baton.api.sampling_params import SamplingParams
from engine import LLM

DEMO_MODEL = Path(__file__).with_name("demo_model")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 4, 2, 64, 640
ROPE_THETA, EPS = 10000.0, 1e-6
NUM_MEDUSA_HEADS = 4
# Number of tokens that EAGLE and MTP draft in training, each from their previous draft
NUM_STEPS = 3
NUM_SHOWN = 512  # number of most probable tokens over which distributions are compared
STEP_WEIGHT = 0.8  # factor from the weight of a draft's loss to the weight of the next draft's loss
OWN_TEXTS = 1024  # number of texts that the demo model writes
# Maximum number of tokens of such a text after its given beginning of 4 to 48 tokens
OWN_TOKENS = 160

# ----------------------------------------------------------------------------------- drafters


class RMSNorm(nn.Module):
    """Root mean square normalisation, as in Qwen3 and Llama."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; tensors are named as in checkpoints."""

    def __init__(self, *, qk_norm: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        if qk_norm:
            self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            projected.view(rows, length, -1, HEAD_DIM).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )  # each [rows, heads, length, HEAD_DIM]
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(length)[:, None] * frequencies
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        query, key = (
            one * cos + torch.cat([-one[..., HEAD_DIM // 2 :], one[..., : HEAD_DIM // 2]], -1) * sin
            for one in (query, key)
        )
        attended = F.scaled_dot_product_attention(
            query.to(value), key.to(value), value, is_causal=True, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))


class GatedMLP(nn.Module):
    """A feed-forward network with a gate (SiLU)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer; EAGLE's layer has no norm before its attention."""

    def __init__(self, *, qk_norm: bool, input_norm: bool) -> None:
        super().__init__()
        self.self_attn = Attention(qk_norm=qk_norm)
        self.mlp = GatedMLP()
        self.input_layernorm = RMSNorm(HIDDEN) if input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle(nn.Module):
    """A layer that predicts the model's next final state (Li et al., EAGLE, arXiv 2401.15077)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Layer(qk_norm=False, input_norm=False)])
        with torch.no_grad():  # initially, the layer copies the previous state
            self.fc.weight.copy_(torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1))
            self.fc.bias.zero_()

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        return self.layers[0](self.fc(torch.cat([embedded, states], -1)))


class Mtp(nn.Module):
    """A layer like the model's, over a token and the previous state (DeepSeek, Qwen)."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList([Layer(qk_norm=True, input_norm=True)])
        self.norm = RMSNorm(HIDDEN)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1))

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        return self.norm(self.layers[0](self.fc(torch.cat(both, -1))))


class Medusa(nn.Module):
    """One head for each token after the next token (Cai et al., Medusa, arXiv 2401.10774)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_MEDUSA_HEADS))
        for head in self.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self, states: Tensor) -> list[Tensor]:
        return [states + F.silu(head(states)) for head in self.heads]


# ----------------------------------------------------------------------------------- training


class Teacher:
    """The demo model, whose predictions the drafters learn; its weights stay fixed."""

    def __init__(self) -> None:
        model = Qwen3ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.embedding = model.get_input_embeddings().weight

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> Tensor:
        """Return the demo model's hidden states after the last norm: `[rows, length, HIDDEN]`."""
        return self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state

    def logits(self, states: Tensor, shown: Tensor | None = None) -> Tensor:
        return F.linear(states, self.embedding if shown is None else self.embedding[shown])


def divergence(logits: Tensor, log_targets: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence from the teacher's distributions per token."""
    return F.kl_div(
        logits.float().log_softmax(-1).flatten(0, 1),
        log_targets.flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )


def losses_of(
    teacher: Teacher, eagle: Eagle, mtp: Mtp, medusa: Medusa, token_ids: Tensor
) -> dict[str, Tensor]:
    """Return each drafter's loss on a batch of token ids `[rows, length]`."""
    states = teacher.states(token_ids)
    with torch.no_grad():
        every = teacher.logits(states).float()
        shown = every.softmax(-1).mean((0, 1)).topk(NUM_SHOWN).indices
        targets = every[..., shown].log_softmax(-1)
    embedded = F.embedding(token_ids, teacher.embedding)
    losses = {}
    for name, drafter in (("eagle", eagle), ("mtp", mtp)):
        known, loss = states, torch.zeros(())
        for step in range(1, NUM_STEPS + 1):
            # known[i] is the state, true or predicted, of token i + step - 1; the next token is i +
            # step.
            known = drafter(embedded[:, step:], known[:, : token_ids.shape[1] - step])
            part = divergence(teacher.logits(known, shown), targets[:, step:])
            if name == "eagle":
                part = part + 0.2 * F.smooth_l1_loss(known, states[:, step:])
            loss = loss + STEP_WEIGHT ** (step - 1) * part
        losses[name] = loss
    drafted = medusa(states)
    losses["medusa"] = sum(
        (
            STEP_WEIGHT**index
            * divergence(teacher.logits(one[:, : -1 - index], shown), targets[:, 1 + index :])
            for index, one in enumerate(drafted)
        ),
        torch.zeros(()),
    )
    return losses


@torch.no_grad()
def acceptance_by_place(
    teacher: Teacher, eagle: Eagle, mtp: Mtp, medusa: Medusa, stream: np.ndarray, length: int
) -> dict[str, list[float]]:
    """Return, by drafter and place, how often a draft at this place is the teacher's best token."""
    found: dict[str, list[list[float]]] = {"eagle": [], "mtp": [], "medusa": []}
    for start in range(0, len(stream) - length, length):
        token_ids = torch.from_numpy(stream[start : start + length])[None]
        states = teacher.states(token_ids)
        best = teacher.logits(states).argmax(-1)
        embedded = F.embedding(token_ids, teacher.embedding)
        for name, drafter in (("eagle", eagle), ("mtp", mtp)):
            known, row = states, []
            for step in range(1, NUM_STEPS + 1):
                known = drafter(embedded[:, step:], known[:, : length - step])
                right = teacher.logits(known).argmax(-1) == best[:, step:]
                row.append(right.float().mean().item())
            found[name].append(row)
        found["medusa"].append(
            [
                (teacher.logits(one[:, : -1 - index]).argmax(-1) == best[:, 1 + index :])
                .float().mean().item()
                for index, one in enumerate(medusa(states))
            ]
        )  # fmt: skip
    return {name: np.mean(rows, axis=0).round(4).tolist() for name, rows in found.items()}


def load_text(seed: int) -> Corpus:
    """Encode the demo model's training text, and about as much text that the model writes."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    sources = collect_sources(Path(sysconfig.get_paths()["stdlib"]))
    training, validation = split_sources(sources, seed)
    documents = encode_in_pieces(tokenizer, training, seed)
    own = write_texts(documents, seed)
    # The model's own texts are repeated until they are about half of all training text.
    size, own_size = (sum(map(len, texts)) for texts in (documents, own))
    return Corpus(
        documents=[*documents, *own * max(round(size / own_size), 1)],
        chats=encode_chats(tokenizer, training),
        validation=np.concatenate(encode_documents(tokenizer, validation)),
    )


def write_texts(documents: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """Let the model continue beginnings of texts: three of four greedily, others by sampling."""
    rng = np.random.default_rng(seed)
    beginnings = []
    for _ in range(OWN_TEXTS):
        document = documents[int(rng.integers(len(documents)))]
        start = rng.integers(max(len(document) - 50, 1))
        beginnings.append(document[start : start + rng.integers(4, 49)].tolist())
    params = [
        SamplingParams(
            max_tokens=OWN_TOKENS, temperature=0.8 if index % 4 == 0 else 0.0, seed=index
        )
        for index in range(OWN_TEXTS)
    ]
    outputs = LLM(str(DEMO_MODEL), dtype="float32").generate(beginnings, params)
    return [
        np.array([*beginning, *output.token_ids], dtype=np.int64)
        for beginning, output in zip(beginnings, outputs, strict=True)
    ]


# --------------------------------------------------------------------------------------- files


def save(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """Write the folder of one drafter: config.json and weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def save_all(output: Path, eagle: Eagle, mtp: Mtp, medusa: Medusa) -> None:
    """Write a folder for each drafter, in the layout that the drafter's authors use."""
    shape: dict[str, object] = {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS, "rope_theta": ROPE_THETA, "vocab_size": 4096, "hidden_act": "silu",
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": True, **shape}
    qwen = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **shape}
    save(output / "eagle", llama, eagle.state_dict())
    save(output / "mtp", qwen, {f"mtp.{name}": one for name, one in mtp.state_dict().items()})
    save(
        output / "medusa",
        {"model_type": "medusa", "medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": 1,
         "hidden_size": HIDDEN, "vocab_size": 4096},
        {
            f"{index}.0.linear.{name}": parameter
            for index, head in enumerate(medusa.heads)
            for name, parameter in head.named_parameters()
        },
    )  # fmt: skip


def main() -> None:
    """Train and save the drafters; print which share of their drafts is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEMO_MODEL)
    parser.add_argument("--minutes", type=float, default=7)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--muon-lr", type=float, default=6e-3, help="of matrices")
    parser.add_argument("--adamw-lr", type=float, default=3e-3, help="of all else")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    corpus, teacher = load_text(args.seed), Teacher()
    batches = Batches(corpus, args.batch_tokens, args.seed)
    drafters = Eagle(), Mtp(), Medusa()
    parameters = [p for drafter in drafters for p in drafter.parameters()]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [p for p in parameters if p.ndim == 2],
            lr=args.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [p for p in parameters if p.ndim == 1],
            lr=args.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0,
        ),
    ]  # fmt: skip
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    started, num_batches = time.monotonic(), 0
    while (progress := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(progress)
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of(teacher, *drafters, batches.next(args.length))
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(losses.values(), torch.zeros(())).backward()
        for drafter in drafters:
            nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        num_batches += 1
        if num_batches % 20 == 0:
            shown = ", ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
            print(f"{progress:.0%} {num_batches} batches: {shown}", flush=True)
    save_all(args.output, *drafters)
    print(f"{num_batches} batches of {args.batch_tokens} tokens", flush=True)
    rights = acceptance_by_place(teacher, *drafters, corpus.validation[:5000], 500)
    for name, shares in rights.items():
        print(f"{name}: right {shares}")


if __name__ == "__main__":
    main()
