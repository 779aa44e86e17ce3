"""Tests that taped decode steps give the bits of eager steps, or are not taped.

Refuses to know: engines, schedulers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import models.cpu.decode_tapes
from baton_kernels import dispatch
from baton_kernels.attention.base import AttentionBackend
from baton_kernels.attention.cpu import CpuAttention
from baton_kernels.attention.native import NativeAttention
from baton_kernels.native.tape import Tape
from models import load_model
from models.cpu.packing import CpuPacker
from models.decoder import DecoderForCausalLM
from tests.numerics.paged import make_cache, make_context, make_metadata, make_tables
from tests.numerics.tiny_models import make_hugging_face_model, save

BLOCK_SIZE = 2

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "Qwen2MoeForCausalLM"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DecoderForCausalLM:
    torch.manual_seed(0)
    network = make_hugging_face_model(request.param)
    folder = save(network, tmp_path_factory.mktemp("model"))
    packer = CpuPacker.choose(torch.float32, "auto")
    found = load_model(folder, dtype=torch.float32, packer=packer)
    assert isinstance(found, DecoderForCausalLM)
    return found


@pytest.fixture(autouse=True)
def num_runs(model: DecoderForCausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No tapes at first; the number of calls of each tape that ran."""
    found: list[int] = []
    run = Tape.run

    def counted(tape: Tape) -> None:
        found.append(len(tape._calls))
        run(tape)

    monkeypatch.setattr(Tape, "run", counted)
    native = dispatch.native_ops()
    assert native is not None
    model.model.tapes = models.cpu.decode_tapes.DecodeTapes(native)
    return found


@torch.inference_mode()
def hidden_states(
    model: DecoderForCausalLM, batches: list[int], backend: AttentionBackend | None = None
) -> list[Tensor]:
    """One decode step of each number of requests, which grow by a token in every step."""
    config, backend = model.config, backend or NativeAttention()
    length = 1 + len(batches)
    table = make_tables([length] * max(batches), BLOCK_SIZE, num_blocks=900)
    cache = make_cache(900, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    cache.zero_()
    found = []
    for step, batch in enumerate(batches):
        seq_len = 1 + step
        # Like the engine: tables are as wide as the longest request, and lie elsewhere each time.
        metadata = make_metadata(
            [1] * batch,
            [seq_len] * batch,
            table[:batch, : -(-seq_len // BLOCK_SIZE)].clone(),
            BLOCK_SIZE,
        )
        backend.plan(metadata)
        positions = torch.full((batch,), seq_len - 1)
        context = make_context(positions, metadata, backend, cache)
        token_ids = (torch.arange(batch) * 7 + step * 5) % 61
        found.append(model.forward(token_ids, context))
    return found


def both(model: DecoderForCausalLM, batches: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    taped = hidden_states(model, batches)
    tapes, model.model.tapes = model.model.tapes, None
    eager = hidden_states(model, batches)
    model.model.tapes = tapes
    return taped, eager


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_taped_steps_are_the_eager_ones(
    model: DecoderForCausalLM, num_runs: list[int], batch: int
) -> None:
    """Across the length at which the block table outgrows a tape."""
    taped, eager = both(model, [batch] * 40)
    assert all(torch.equal(one, other) for one, other in zip(taped, eager, strict=True))
    assert len(num_runs) == 40 - 4  # of each width the first step is eager, the second recorded
    assert len(set(num_runs)) == 1


def test_batches_that_change_are_taped_when_they_stay(
    model: DecoderForCausalLM, num_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.cpu.decode_tapes, "FEW_ROWS", 0)
    taped, eager = both(model, [1, 2, 1, 2, 2, 1, 2, 2])
    assert all(torch.equal(one, other) for one, other in zip(taped, eager, strict=True))
    assert len(num_runs) == 2  # 2 came twice in a row, and its tape was kept


def test_small_shapes_that_come_by_turns_are_taped(
    model: DecoderForCausalLM, num_runs: list[int]
) -> None:
    taped, eager = both(model, [1, 2, 1, 2, 3, 1, 2])
    assert all(torch.equal(one, other) for one, other in zip(taped, eager, strict=True))
    assert len(num_runs) == 2  # all that came twice before


def test_old_tapes_make_room(
    model: DecoderForCausalLM, num_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.cpu.decode_tapes, "MAX_ROWS_KEPT", 5)
    monkeypatch.setattr(models.cpu.decode_tapes, "FEW_ROWS", 0)
    hidden_states(model, [3, 3, 2, 2, 3, 4, 4, 3, 4])
    # 3 and 2 fit together; 4 pushes both out, so the 3 behind it is eager; 6 is too many.
    assert len(num_runs) == 2
    hidden_states(model, [6, 6, 6])
    assert len(num_runs) == 2


def test_a_layer_that_torch_computes_is_not_taped(
    model: DecoderForCausalLM, num_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = model.model.norm
    add = norm.add
    monkeypatch.setattr(norm, "add", lambda x, *others: add(x * 1.5, *others))
    taped, eager = both(model, [2] * 5)
    assert all(torch.equal(one, other) for one, other in zip(taped, eager, strict=True))
    assert not num_runs


def test_an_attention_that_torch_computes_is_not_taped(
    model: DecoderForCausalLM, num_runs: list[int]
) -> None:
    found = hidden_states(model, [2] * 5, CpuAttention())
    model.model.tapes = None
    for one, other in zip(found, hidden_states(model, [2] * 5, CpuAttention()), strict=True):
        assert torch.equal(one, other)
    assert not num_runs
