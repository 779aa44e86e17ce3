"""Decode steps as a graph computes them: static inputs, padding, tokens that stay on the device.

On a GPU they are captured and replayed. Without one, Triton's interpreter runs the very same
kernels on the very same inputs, and a replay is one more call of what would have been captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.api.outputs import Completion, FinishReason
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from engine import LLM
from engine.executors.uniproc import worker_of
from engine.worker.cuda_graphs import StepGraphs
from engine.worker.graph_capture import DeviceCapture
from engine.worker.inputs.prepared_step import ReplayStep
from engine.worker.make_runner import LoadedModel, make_model_runner
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.drafting_executor import DraftingExecutor, outputs_of
from tests.kernels.conftest import DEVICE
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.large

MODEL = str(DEMO_MODEL)
SMALL: dict[str, Any] = {
    "attention_backend": "triton",
    "dtype": "float32",
    "block_size": 8,
    "num_blocks": 24,
    "max_num_requests": 5,
    "max_num_batched_tokens": 48,
    "long_prefill_token_threshold": 32,
}


def run_again(body: Callable[[], None]) -> Callable[[], None]:
    """Stand in for a capture on a CPU: run the body now, and again at each replay."""
    body()
    return body


def make_llm(device: torch.device, *, graphs: bool, asynchronous: bool, model: str = MODEL) -> LLM:
    """Make an engine whose steps are sampled by the kernel, also on a CPU."""
    options = {**SMALL, "device": str(device), "async_scheduling": asynchronous}
    llm = LLM(model, cuda_graphs=False, **options)
    engine = llm.engine
    spec, worker = engine.kv_memory.spec, worker_of(engine.executor)
    backends = ("triton",) * spec.num_groups
    worker.runner = runner = make_model_runner(
        LoadedModel(worker.runner._model, spec, EngineConfig(**options), device, backends),
        engine.kv_memory.tensor,
        engine.max_model_len,
        with_graphs=graphs,
        samples_on_device=True,
    )
    if graphs:
        runner.decode_graphs.capture(run_again if device.type == "cpu" else DeviceCapture())
    return llm


def draw_requests(seed: int, num: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts = [draw.choices(range(10, 4000), k=draw.randint(1, 9)) for _ in range(num)]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 7),
            temperature=draw.choice([0.0, 0.7]),
            top_k=draw.choice([0, 20]),
            top_p=draw.choice([1.0, 0.9]),
            seed=index,
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
            logprobs=draw.choice([None, None, 2]),
            stop_token_ids=tuple(draw.sample(range(4096), 40)),
        )
        for index in range(num)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def eager() -> list[Completion]:
    """Completions of steps without graphs."""
    llm = make_llm(DEVICE, graphs=False, asynchronous=False)
    assert worker_of(llm.engine.executor).runner.decode_graphs.graphs is None
    return llm.generate(*draw_requests(3, 7))


@pytest.mark.parametrize(("asynchronous", "num_drafts"), [(False, 0), (True, 0), (True, 2)])
def test_replayed_steps_give_the_tokens_of_eager_ones(
    device: torch.device,
    eager: list[Completion],
    asynchronous: bool,
    num_drafts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, params = draw_requests(3, 7)
    sizes: list[tuple[int, int]] = []
    num_drafted = 0
    replay = StepGraphs.replay

    def count(self: StepGraphs, staged: ReplayStep) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal num_drafted
        sizes.append((staged.num_requests, staged.size))
        num_drafted += bool(staged.sampling.draft_token_ids)
        return replay(self, staged)

    monkeypatch.setattr(StepGraphs, "replay", count)
    llm = make_llm(device, graphs=True, asynchronous=asynchronous)
    if num_drafts:
        outputs = {one.request_id: one.token_ids for one in eager}
        llm.engine.executor = executor = DraftingExecutor(
            llm.engine.executor, outputs_of(outputs), num_drafts, wrong_every=3
        )
    replayed = llm.generate(prompts, params)
    assert [c.token_ids for c in replayed] == [c.token_ids for c in eager]
    assert [c.finish_reason for c in replayed] == [c.finish_reason for c in eager]
    assert llm.engine.block_pool.num_free == SMALL["num_blocks"]
    if num_drafts:
        assert 0 < executor.num_accepted < executor.num_computed
        assert num_drafted
        return
    assert len(sizes) > 5
    assert any(num_requests < size for num_requests, size in sizes)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose embedding can be broken without breaking its output head."""
    model = make_hugging_face_model("LlamaForCausalLM", tie_word_embeddings=False)
    return save(model, tmp_path_factory.mktemp("untied"))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # of the interpreter
def test_nan_logits_end_their_request_and_no_other(
    untied: Path,
    device: torch.device,
    temperature: float,
    asynchronous: bool,
    graphs: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request's third token has NaN for an embedding; before, token 0 came next."""
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=2, ignore_eos=True)
    prompts = [[11, 12], [13]]
    llm = make_llm(device, graphs=graphs, asynchronous=asynchronous, model=str(untied))
    bad, good = llm.generate(prompts, params)
    broken = bad.token_ids[2]
    assert broken not in (*good.token_ids, *bad.token_ids[:2], *prompts[0], *prompts[1])
    model = worker_of(llm.engine.executor).runner._model
    assert isinstance(model, torch.nn.Module)
    [embedding] = [p for name, p in model.named_parameters() if "embed_tokens" in name]
    with torch.no_grad():
        embedding[broken] = torch.nan
    llm.engine.block_pool.reset_prefix_cache()
    found, other = llm.generate(prompts, params)
    assert (found.finish_reason, found.token_ids) == (FinishReason.ABORT, bad.token_ids[:3])
    assert other.token_ids == good.token_ids
    assert "the model's logits are not numbers" in caplog.text
    assert llm.engine.block_pool.num_free == SMALL["num_blocks"]
