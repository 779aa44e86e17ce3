"""Send a fresh split system with a vocabulary of 262,144 its first schema, or costly grammars.

Each start is a router, a prefill and a decode node (NIXL) with a tiny random model. A client
streams text; then another client sends the first schema. The output has that request's status and
time, the longest gap of the stream, and log lines about silent nodes. Exit 1 if a start fails.

    python -m benchmarks large_vocabulary --starts 20
    python -m benchmarks large_vocabulary --grammars 32,96     (how long a stream stands still)
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import torch
from safetensors.torch import save_file

from baton import AsyncClient, SamplingParams, StructuredOutput
from baton.api.errors import BatonError
from baton.deployment.local_deployment import LocalDeployment
from benchmarks.runner.checkpoints import ids_of, tokenizer_document
from benchmarks.runner.deployments import deployed
from benchmarks.runner.run import Document, Run

NUM_TOKENS = 262_144
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
HIDDEN, INTERMEDIATE, LAYERS = 64, 128, 2
MAX_FIRST_S, MAX_GAP_S = 1.5, 0.25
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_LOSS = ("silent", "went away", "is gone", "lost", "ejected", "refused for")
NODE_ARGS = [
    *("--dtype", "float32", "--num-blocks", "4000", "--max-num-requests", "128"),
    *("--max-model-len", "4096", "--num-threads", "1"),
]


def make_model(folder: Path) -> Path:
    """Write a random Llama of two layers with a SentencePiece-like vocabulary, as Gemma has."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": NUM_TOKENS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 2,
        "eos_token_id": [1, 5],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(), folder / "model.safetensors")
    return folder


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    weights = {"model.embed_tokens.weight": draw(NUM_TOKENS, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HIDDEN), ("k", 32), ("v", 32), ("o", HIDDEN)):
            weights[f"{at}self_attn.{name}_proj.weight"] = draw(rows, HIDDEN)
        for name in ("gate", "up"):
            weights[f"{at}mlp.{name}_proj.weight"] = draw(INTERMEDIATE, HIDDEN)
        weights[f"{at}mlp.down_proj.weight"] = draw(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(HIDDEN)
    return weights


def _tokenizer() -> dict[str, object]:
    """Make a BPE tokenizer with byte fallback; each token joins two shorter tokens."""
    draw = random.Random(7)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["\u2581", *string.ascii_letters, *string.digits, *string.punctuation, "\n", "\t"]
    letters += [chr(code) for code in (*range(0xA1, 0x500), *range(0x4E00, 0x5A00))]
    seen, merges = set(tokens), []
    for letter in letters:
        if letter not in seen:
            seen.add(letter)
            tokens.append(letter)
    common = ["\u2581", *string.ascii_letters, *string.digits, *'.,:;{}[]"_-/']
    while len(tokens) < NUM_TOKENS:
        left = draw.choice(common if draw.random() < 0.9 else letters)
        right = draw.choice(common[:20_000] if draw.random() < 0.9 else letters)
        if len(left) + len(right) <= 16 and left + right not in seen:
            seen.add(left + right)
            tokens.append(left + right)
            common.append(left + right)
            merges.append([left, right])
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    model = {
        "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
        "vocab": ids_of(tokens), "merges": merges,
    }  # fmt: skip
    return tokenizer_document(
        model,
        specials=SPECIAL,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        decoder={"type": "Sequence", "decoders": decoders},
    )


@dataclass(slots=True)
class Watched:
    """A stream that other clients' requests must not delay."""

    gaps_s: list[float] = field(default_factory=list)
    error: str = ""

    async def run(self, client: AsyncClient) -> None:
        params = SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)
        last = 0.0
        try:
            async for _ in client.stream([2, 300, 400], params):
                now = time.monotonic()
                if last:
                    self.gaps_s.append(now - last)
                last = now
        except BatonError as error:
            self.error = f"{type(error).__name__}: {error}"


@asynccontextmanager
async def watched_stream(client: AsyncClient) -> AsyncIterator[Watched]:
    """Yield a stream that has begun; cancel it afterwards."""
    watched = Watched()
    task = asyncio.create_task(watched.run(client))
    while len(watched.gaps_s) < 20 and not task.done():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    watched.gaps_s.clear()
    yield watched
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@dataclass(slots=True)
class Start:
    """Measurements of one fresh system."""

    ready_s: float
    status: int
    first_s: float
    longest_gap_s: float
    error: str
    said_of_loss: list[str]

    @property
    def is_well(self) -> bool:
        fast = self.first_s <= MAX_FIRST_S and self.longest_gap_s <= MAX_GAP_S
        return self.status == 200 and fast and not self.error and not self.said_of_loss


async def first_schema(deployment: LocalDeployment, ready_s: float) -> Start:
    url = f"http://{deployment.config.http_listen}/v1/completions"
    body = {
        "model": str(deployment.config.model),
        "prompt": [2, 300, 400],
        "max_tokens": 24,
        "guided_json": SCHEMA,
    }
    async with (
        AsyncClient(deployment.config.listen) as client,
        watched_stream(client) as watched,
        aiohttp.ClientSession() as session,
    ):
        began_at = time.monotonic()
        async with session.post(url, json=body) as response:
            text = await response.text()
        first_s = time.monotonic() - began_at
        await asyncio.sleep(0.5)
    error = watched.error or ("" if response.status == 200 else text[:300])
    gap_s = max(watched.gaps_s, default=float("inf"))
    return Start(ready_s, response.status, first_s, gap_s, error, [])


def fresh_start(model: Path) -> Start:
    with tempfile.TemporaryDirectory() as logs:
        began_at = time.monotonic()
        with deployed(
            model, with_http=True, node_args=NODE_ARGS, log_folder=Path(logs)
        ) as deployment:
            ready_s = time.monotonic() - began_at
            start = asyncio.run(first_schema(deployment, ready_s))
            text = "".join(path.read_text(errors="replace") for path in Path(logs).iterdir())
        lines = text.splitlines()
        start.said_of_loss = [line for line in lines if any(word in line for word in OF_LOSS)]
        return start


@dataclass(slots=True)
class Dear:
    """Measurements of costly grammars, all at once, while one stream runs."""

    num_grammars: int
    longest_gap_s: float
    gaps_over_100_ms: int
    num_tokens: int
    errors: list[str]


async def dear_grammars(deployment: LocalDeployment, num_grammars: int) -> Dear:
    letters = string.ascii_lowercase
    params = [
        SamplingParams(
            max_tokens=12,
            seed=index,
            structured_output=StructuredOutput(
                regex=rf"(.|\n)*[{letters[index % 13]}-z](.|\n){{12,{13 + index // 13}}}z"
            ),
        )
        for index in range(num_grammars)
    ]
    errors: list[str] = []

    async def ask(client: AsyncClient, one: SamplingParams) -> None:
        try:
            await client.generate([2, 300, 400], one, timeout_s=120)
        except BatonError as error:
            errors.append(f"{type(error).__name__}: {error}"[:160])

    async with AsyncClient(deployment.config.listen) as client, watched_stream(client) as watched:
        await asyncio.gather(*(ask(client, one) for one in params))
    if watched.error:
        errors.append(f"the stream: {watched.error}")
    gap_s = max(watched.gaps_s, default=float("inf"))
    num_long = sum(gap > 0.1 for gap in watched.gaps_s)
    return Dear(num_grammars, gap_s, num_long, len(watched.gaps_s), sorted(set(errors))[:4])


def run_dear(model: Path, counts: Sequence[int]) -> list[Dear]:
    with deployed(model, node_args=NODE_ARGS) as deployment:
        return [asyncio.run(dear_grammars(deployment, count)) for count in counts]


def run(
    run: Run, starts: int = 0, grammars: Sequence[int] = (), model: Path | None = None
) -> Document:
    """Send fresh systems their first schema, and costly grammars.

    Args:
        starts: fresh systems.
        grammars: numbers of costly grammars at once, for example 32,96.
        model: a folder to keep the model in.
    """
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = model or Path(temporary)
        if not (folder / "model.safetensors").exists():
            make_model(folder)
        for number in range(starts):
            found.append(start := fresh_start(folder))
            if not start.is_well:
                run.problems.append(f"start {number + 1}: {start}")
        dear = run_dear(folder, grammars) if grammars else []
    return {"starts": [asdict(one) for one in found], "dear": [asdict(one) for one in dear]}
