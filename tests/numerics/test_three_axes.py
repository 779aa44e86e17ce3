"""Positions on three axes equal those of transformers, for any images between any text."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from baton.api.images import ImageSpan
from baton.api.sampling_params import SamplingParams
from engine.core.step_plan import NewRow
from engine.worker.inputs.three_axes import (
    RotaryPositions,
    position_delta,
    three_axis_positions,
)

MERGE = 2
grids = st.tuples(st.just(1), st.integers(1, 7), st.integers(1, 7))
texts = st.integers(1, 5)  # between two images there is at least the mark of an end
prompts = st.lists(st.tuples(texts, grids), max_size=4)


def spans_of(
    parts: list[tuple[int, tuple[int, int, int]]], num_last: int
) -> tuple[int, list[ImageSpan]]:
    """Return the length of a prompt, and its images."""
    end, spans = 0, []
    for num_text, grid in parts:
        size = int(np.prod(grid))
        spans.append(ImageSpan(end + num_text, size, b"d" * 16, grid))
        end = spans[-1].end
    return end + num_last, spans


def by_transformers(num_tokens: int, spans: list[ImageSpan]) -> tuple[torch.Tensor, int]:
    kinds = torch.zeros(1, num_tokens, dtype=torch.int32)
    for span in spans:
        kinds[0, span.first : span.end] = 1
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(model)
    grid = torch.tensor(
        [[f, rows * MERGE, cols * MERGE] for f, rows, cols in (s.grid for s in spans)]
    )
    ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    positions, delta = Qwen2_5_VLModel.get_rope_index(model, ids, kinds, grid if spans else None)
    return positions[:, 0], int(delta)


@settings(max_examples=50, deadline=None)
@given(parts=prompts, num_last=st.integers(1, 5))
def test_positions_equal_those_of_transformers(
    parts: list[tuple[int, tuple[int, int, int]]], num_last: int
) -> None:
    num_tokens, spans = spans_of(parts, num_last)
    expected, delta = by_transformers(num_tokens, spans)
    assert three_axis_positions(num_tokens, spans).tolist() == expected.tolist()
    assert position_delta(spans) == delta


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(prompts, min_size=1, max_size=3), data=st.data())
def test_rows_have_the_positions_of_their_own_prompts(
    parts: list[list[tuple[int, tuple[int, int, int]]]], data: st.DataObject
) -> None:
    rows = RotaryPositions(len(parts))
    token_rows, positions = list[int](), list[int]()
    expected = []
    for row, prompt in enumerate(parts):
        num_tokens, spans = spans_of(prompt, num_last=6)
        place(rows, row, spans)
        first = data.draw(st.integers(0, num_tokens - 1))
        end = data.draw(st.integers(first + 1, num_tokens))
        token_rows += [row] * (end - first)
        positions += range(first, end)
        expected.append(three_axis_positions(num_tokens, spans)[:, first:end])
    found = rows.rotate(np.array(token_rows), np.array(positions))
    wanted = np.concatenate(expected, axis=1)
    assert (np.broadcast_to(found, wanted.shape) == wanted).all()
    assert rows.is_active is any(parts)


def test_a_row_of_a_prompt_without_images_rotates_by_plain_positions() -> None:
    rows = RotaryPositions(1)
    place(rows, 0, spans_of([(2, (1, 3, 2))], 1)[1])
    assert rows.rotate(np.array([0]), np.array([20])).tolist() == [20 + 3 - 6]
    place(rows, 0, [])
    assert not rows.is_active
    assert rows.rotate(np.array([0]), np.array([20])).tolist() == [20]


def place(rows: RotaryPositions, row: int, spans: list[ImageSpan]) -> None:
    params = SamplingParams()
    rows.place(NewRow(row, str(row), params, 0, 1, frozenset(), [], images=tuple(spans)))
