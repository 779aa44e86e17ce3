"""Steps with prompts as graphs compute them: by layers, padded, with tiles that are filled later.

Without a GPU the operators and kernels of each layer are recorded, and run again over the same
memory by Triton's interpreter; see `tests/fakes/engine/recorded_pieces.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import baton_kernels
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from baton_kernels import dispatch, reference
from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.attention.triton import TritonAttention
from engine.core.step_plan import NewBlocks, NewRow, StepHooks, StepPlan
from engine.worker.chunks import chunk_graphs
from engine.worker.chunks.chunk_graphs import ChunkGraphs, chunk_sizes, reason_against_chunks
from engine.worker.graph_capture import DeviceCapture
from engine.worker.inputs.prepared_step import ModelInput
from engine.worker.kv_cache import allocate_kv_cache, kv_cache_spec
from engine.worker.make_runner import LoadedModel, make_model_runner
from engine.worker.model_runner import NO_HOOKS
from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.parallel.group import ALONE
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.recorded_pieces import RecordedPieces
from tests.kernels.conftest import DEVICE
from tests.numerics.paged import make_cache, make_metadata, make_tables

pytestmark = pytest.mark.medium

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "layer_types": None,
}  # fmt: skip
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 8, 12, 64
OPTIONS = EngineConfig(
    block_size=BLOCK_SIZE, max_num_requests=3, max_num_batched_tokens=48,
    long_prefill_token_threshold=32, cuda_graph_max_chunk=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def triton_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ops as on a GPU."""
    monkeypatch.setattr(baton_kernels, "ops_for", lambda tensor: dispatch._triton_ops())


@pytest.fixture(scope="module")
def model() -> Any:
    """A network of random weights."""
    torch.manual_seed(5)
    values = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig.from_dict(values | SHAPE)
    made = DecoderForCausalLM(config)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=0.3)
    return made.to(DEVICE)


class Runner:
    """A runner and its cache."""

    def __init__(self, model: Any) -> None:
        spec = kv_cache_spec(model.kv_layers, BLOCK_SIZE, torch.float32)
        self.memory = allocate_kv_cache(spec, NUM_BLOCKS, DEVICE)
        self.runner = make_model_runner(
            LoadedModel(model, spec, OPTIONS, DEVICE, ("triton",)), self.memory, MAX_LEN,
            with_chunks=True, samples_on_device=False,
        )  # fmt: skip
        self.caches = [cache for cache in spec.layer_caches(self.memory) if torch.is_tensor(cache)]

    def execute(self, plan: StepPlan, hooks: StepHooks = NO_HOOKS) -> Any:
        return self.runner.execute(plan, hooks).sampled_token_ids


@pytest.fixture
def replaying(model: Any, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Chunks of up to 8 and of up to 16 tokens are captured."""
    monkeypatch.setattr(chunk_graphs, "LEAST_SIZE", 8)
    made = Runner(model)
    on_cpu = DEVICE.type == "cpu"
    capture = RecordedPieces(monkeypatch) if on_cpu else DeviceCapture().pieces
    assert made.runner.chunk_graphs.capture(capture) == (8, 16)
    return made


def new_row(row: int, num_tokens: int, first_block: int) -> tuple[NewRow, NewBlocks]:
    """A prompt of so many tokens, and its blocks."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    params = SamplingParams(temperature=0.0)
    return (
        NewRow(row, f"request-{row}", params, 0, num_tokens, frozenset(), []),
        NewBlocks(row, list(range(first_block, first_block + num_blocks))),
    )


def steps() -> list[StepPlan]:
    """A chunk; another one beside a whole prompt; one token of each; one that is too long."""
    (first, first_blocks), (second, second_blocks) = new_row(0, 19, 1), new_row(1, 4, 5)
    third, third_blocks = new_row(2, 20, 7)
    return [
        StepPlan((first,), (first_blocks,), [0, 0, 13, 19], list(range(20, 33))),
        StepPlan(
            (second,), (second_blocks,), [0, 13, 6, 19, 1, 0, 4, 4],
            [*range(33, 39), 50, 51, 52, 53],
        ),
        StepPlan((), (), [0, 19, 1, 20, 1, 4, 1, 5], [11, 12]),
        StepPlan((third,), (third_blocks,), [2, 0, 20, 20], list(range(40, 60))),
    ]  # fmt: skip


def test_replayed_steps_compute_what_eager_ones_do(
    model: Any, replaying: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    replay = ChunkGraphs.replay

    def count(self: ChunkGraphs, inputs: ModelInput, after_layer: Any) -> Tensor:
        sizes.append(len(inputs.input_ids))
        return replay(self, inputs, after_layer)

    monkeypatch.setattr(ChunkGraphs, "replay", count)
    eager = Runner(model)
    for plan in steps():
        assert replaying.execute(plan) == eager.execute(plan)
        torch.testing.assert_close(replaying.memory, eager.memory, rtol=1e-4, atol=1e-5)
    assert sizes == [13, 10, 2]  # the last step has more tokens than are captured


def test_a_layers_keys_are_there_when_its_callback_is_called(replaying: Runner) -> None:
    written: list[tuple[int, list[bool]]] = []

    def look(layer: int) -> None:
        written.append((layer, [bool(cache[1:3].any()) for cache in replaying.caches]))

    replaying.execute(steps()[0], StepHooks(after_layer=look))
    layers = range(SHAPE["num_hidden_layers"])
    assert written == [(layer, [other <= layer for other in layers]) for layer in layers]
    assert not any(bool(cache[3:].any()) for cache in replaying.caches)  # padding went nowhere


LENS = {
    "one prompt": ([7], [7]),
    "a chunk behind others": ([5], [30]),
    "cut along the keys": ([4], [1300]),
    "decodes too": ([1, 6, 1, 3], [9, 6, 700, 21]),
    "other requests": ([1, 1], [3, 40]),
}


@pytest.mark.parametrize("window", [None, 9])
def test_captured_attention_is_that_of_the_step_it_was_told(window: int | None) -> None:
    torch.manual_seed(3)
    backend, num_tokens, max_requests, max_blocks = TritonAttention(), 16, 4, 90
    cache = make_cache(400, 1, 2, 16, 24)[:, 0].normal_().to(DEVICE)
    query = torch.randn(num_tokens, 4, 24, device=DEVICE)
    static = AttentionMetadata(
        max_requests,
        num_tokens,
        torch.zeros(max_requests + 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(max_requests, dtype=torch.int32, device=DEVICE),
        torch.zeros(max_requests, max_blocks, dtype=torch.int32, device=DEVICE),
        torch.full((num_tokens,), -1, device=DEVICE),
        num_tokens,
        2000,
        (),
        (),
    )

    def attend() -> Tensor:
        backend.plan_captured(static)
        return backend.run(
            query, cache, static, AttentionOptions(scale=0.25, sliding_window=window)
        )

    assert not attend().any()  # nobody is there yet
    for query_lens, seq_lens in LENS.values():
        tables = make_tables(seq_lens, 16, 400)
        step = make_metadata(query_lens, seq_lens, tables, 16)
        static.query_start_loc[: len(query_lens) + 1] = step.query_start_loc
        static.seq_lens[: len(seq_lens)] = step.seq_lens
        static.block_table[: len(seq_lens), : step.block_table.shape[1]] = step.block_table
        backend.fill_captured(num_tokens, query_lens, seq_lens)
        num_new = sum(query_lens)
        expected = reference.paged_attention(
            query[:num_new], cache, step.block_table, step.query_lens, step.seq_lens_host,
            scale=0.25, sliding_window=window,
        )  # fmt: skip
        found = attend()
        torch.testing.assert_close(found[:num_new], expected, rtol=1e-4, atol=1e-4)
        assert not found[num_new:].any()


def test_sizes_rise_to_the_largest() -> None:
    assert chunk_sizes(512) == (128, 256, 384, 512)
    assert chunk_sizes(300) == (128, 256, 300)
    assert chunk_sizes(40) == (40,)


@pytest.mark.parametrize(
    ("options", "device", "backend", "reason"),
    [
        ({}, "cuda", "triton", None),
        ({}, "cpu", "triton", "the model is on cpu"),
        ({"cuda_graphs": False}, "cuda", "triton", "switched off"),
        ({"cuda_graph_max_chunk": 0}, "cuda", "triton", "switched off"),
        ({"cuda_graph_max_batch": 0}, "cuda", "triton", None),
        ({}, "cuda", "reference", "attention backend reference cannot be captured"),
        ({}, "cuda", "triton_invariant", "attention cuts prompts by their positions"),
        ({}, "cuda", None, "steps of models with states are not captured"),
    ],
)
def test_there_is_a_reason_where_prompts_are_not_captured(
    options: dict[str, Any], device: str, backend: str | None, reason: str | None
) -> None:
    found = reason_against_chunks(EngineConfig(**options), torch.device(device), (backend,), ALONE)
    assert found == reason
