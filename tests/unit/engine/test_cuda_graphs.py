"""Unit tests of what graphs read: sizes, padding, addresses, tokens that only the device knows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from engine.core.outputs import ScheduledRequest
from engine.core.request import Request
from engine.core.step_plan import StepPlan, StepPlanner
from engine.core.steps_in_flight import add_in_flight
from engine.sampling import device_sampling
from engine.sampling.device_sampling import (
    PARAMETER_TYPES,
    kernel_arrays,
    kernel_parameters,
    upload_parameters,
)
from engine.worker.cuda_graphs import captured_sizes, reason_against_graphs
from engine.worker.device_choice import check_allocator
from engine.worker.graph_inputs import GraphInputs
from engine.worker.input_batch import InputBatch
from engine.worker.inputs import request_rows
from engine.worker.inputs.prepared_step import PreparedStep, ReplayStep
from tests.fakes.engine.engine_parts import make_request
from tests.fakes.engine.prepared_steps import attention_groups
from tests.fakes.engine.sampling import sampling_input

CPU = torch.device("cpu")
MAX_SEQ_LEN = 16


def make_inputs(num_groups: int = 1) -> GraphInputs:
    return GraphInputs(
        captured_sizes(5),
        num_rows=6,
        max_blocks=9,
        num_groups=num_groups,
        max_seq_len=MAX_SEQ_LEN,
        device=CPU,
    )


def make_batch(inputs: GraphInputs, num_groups: int = 1) -> InputBatch:
    return InputBatch(
        max_num_requests=6,
        max_num_tokens=40,
        sliding_windows=[None, 4][:num_groups],
        max_blocks=9,
        block_size=2,
        device=CPU,
        graph_inputs=inputs,
    )


def decoding(
    name: str, num_tokens: int, first_block: int, num_groups: int = 1, **params: float
) -> Request:
    """Make a request that must compute the last of its tokens, `[10, 11, ..]`."""
    request = make_request(
        name,
        prompt=[10 + index for index in range(num_tokens)],
        params=SamplingParams(**params) if params else None,  # type: ignore[arg-type]
        seed=len(name),
    )
    request.num_computed_tokens = num_tokens - 1
    num_blocks = (num_tokens + 2) // 2 * num_groups
    request.block_ids = list(range(first_block, first_block + num_blocks))
    return request


def plan(*requests: Request, num_tokens: int = 1) -> StepPlan:
    """Each request computes so many tokens; its row is its own while nobody takes it away."""
    rows = {request.row for request in requests}
    planner = StepPlanner(6)
    planner._free_rows = [row for row in planner._free_rows if row not in rows]
    return planner.plan([ScheduledRequest(request, num_tokens) for request in requests])


def stage(batch: InputBatch, *requests: Request) -> ReplayStep:
    staged = batch.fill_or_stage(plan(*requests))
    assert isinstance(staged, ReplayStep)
    return staged


def input_ids(inputs: GraphInputs, size: int) -> list[int]:
    ids: list[int] = inputs.source.index_select(0, inputs.section("token_index", size)).tolist()
    return ids


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (5, (1, 2, 4, 5)),
        (24, (1, 2, 4, 8, 16, 24)),
        (280, (1, 2, 4, *range(8, 256, 8), 256, 272, 280)),
    ],
)
def test_captured_sizes(most: int, expected: tuple[int, ...]) -> None:
    assert captured_sizes(most) == expected


def test_a_step_is_padded_to_the_next_captured_size() -> None:
    inputs = make_inputs()
    assert [inputs.size_for(n) for n in range(1, 7)] == [1, 2, 4, 4, 5, None]


@pytest.mark.parametrize(
    ("options", "device", "backend", "expected"),
    [
        ({"cuda_graphs": False}, "cuda", "triton", "switched off"),
        ({}, "cpu", "triton", "the model is on cpu"),
        ({}, "cuda", "flash_attn", "attention backend flash_attn cannot be captured"),
        ({}, "cuda", "triton", None),
    ],
)
def test_why_there_are_no_graphs(
    options: dict[str, bool], device: str, backend: str, expected: str | None
) -> None:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    assert reason_against_graphs(config, torch.device(device), (backend,)) == expected


def test_inputs_of_a_padded_step() -> None:
    inputs = make_inputs()
    batch = make_batch(inputs)
    requests = [decoding("a", 5, 20), decoding("b", 2, 30), decoding("c", 7, 40)]
    inputs.upload(stage(batch, *requests))
    (metadata,) = inputs.metadata(4)
    assert input_ids(inputs, 4) == [14, 11, 16, 0]
    assert inputs.section("positions", 4).tolist() == [4, 1, 6, 0]
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 3]
    assert metadata.seq_lens.tolist() == [5, 2, 7, 0]
    assert metadata.slot_mapping.tolist() == [22 * 2, 30 * 2 + 1, 43 * 2, -1]
    assert metadata.block_table.shape == (4, 9)
    assert metadata.block_table[:3, :4].tolist() == [
        [20, 21, 22, 0],
        [30, 31, 0, 0],
        [40, 41, 42, 43],
    ]
    assert (metadata.max_query_len, metadata.max_seq_len) == (1, MAX_SEQ_LEN)
    assert metadata.query_lens == (1,) * 4


def test_a_smaller_step_leaves_nothing_of_a_larger_one_in_its_padding() -> None:
    inputs = make_inputs()
    batch = make_batch(inputs)
    many = [decoding(name, 6, 10 * index) for index, name in enumerate("abcd")]
    inputs.upload(stage(batch, *many))
    staged = stage(batch, *many[:3])
    assert (staged.num_requests, staged.size) == (3, 4)
    inputs.upload(staged)
    (metadata,) = inputs.metadata(4)
    assert metadata.seq_lens.tolist() == [6, 6, 6, 0]
    assert metadata.slot_mapping.tolist()[3] == -1
    assert inputs.section("rows", 4).tolist()[3] == 6  # nobody's
    assert inputs.sampling_tensors(4)["temperatures"].tolist()[3] == 0


def test_every_group_has_its_blocks() -> None:
    inputs = make_inputs(num_groups=2)
    batch = make_batch(inputs, num_groups=2)
    inputs.upload(stage(batch, decoding("a", 4, 20, 2), decoding("b", 3, 40, 2)))
    first, second = inputs.metadata(2)
    assert first.block_table[:, :2].tolist() == [[20, 22], [40, 42]]
    assert second.block_table[:, :2].tolist() == [[21, 23], [41, 43]]
    assert second.slot_mapping.tolist() == [23 * 2 + 1, 43 * 2]


def test_a_decode_step_with_drafts_is_replayed_with_each_token_as_a_request() -> None:
    inputs = make_inputs()
    batch, planner = make_batch(inputs), StepPlanner(6)
    a, b = decoding("a", 5, 1), decoding("b", 4, 10)
    a.block_ids.append(8)
    drafting = [ScheduledRequest(a, 3, (7, 9)), ScheduledRequest(b, 1)]
    staged = batch.fill_or_stage(planner.plan(drafting))
    assert isinstance(staged, ReplayStep)
    inputs.upload(staged)
    assert (staged.num_requests, staged.size) == (4, 4)
    assert input_ids(inputs, 4) == [14, 7, 9, 13]
    assert inputs.section("positions", 4).tolist() == [4, 5, 6, 3]
    [attention] = inputs.metadata(4)
    assert attention.seq_lens.tolist() == [5, 6, 7, 4]
    assert attention.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    tables = attention.block_table.tolist()
    assert tables[0] == tables[1] == tables[2] != tables[3]
    slots = [
        block * 2 + place % 2 for block, place in zip([*tables[0][2:4], 0], (4, 6), strict=False)
    ]
    assert attention.slot_mapping.tolist()[:3] == [slots[0], slots[0] + 1, slots[1]]
    assert staged.sampling.request_ids == ("a", "a", "a", "b")
    assert staged.sampling.draft_token_ids == (7, 9, -1, -1)
    assert staged.sampling.accept([7, 8, 5, 6]) == {"a": (7, 8), "b": (6,)}
    a.token_ids += [7, 8]
    a.num_computed_tokens = 6
    behind = batch.fill_or_stage(planner.plan([ScheduledRequest(a, 1)]))
    assert isinstance(behind, ReplayStep)
    assert behind.sampling.accept([5]) == {"a": (5,)}


def test_drafts_beside_a_prompt_or_beyond_the_rows_are_computed_eagerly() -> None:
    planner = StepPlanner(6)
    batch = make_batch(make_inputs())
    a, b = decoding("a", 5, 1), make_request("b", 3)
    a.block_ids += [8, 9, 5]
    b.block_ids += [20, 21]
    beside = planner.plan([ScheduledRequest(a, 3, (7, 9)), ScheduledRequest(b, 3)])
    prepared = batch.fill_or_stage(beside)
    assert isinstance(prepared, PreparedStep)
    assert prepared.model.last_token_rows.tolist() == [0, 1, 2, 5]
    assert attention_groups(prepared)[0].query_lens == (3, 3)
    beyond = batch.fill_or_stage(planner.plan([ScheduledRequest(a, 7, (7, 9, 7, 7, 7, 7))]))
    assert isinstance(beyond, PreparedStep)
    assert beyond.model.last_token_rows.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert attention_groups(beyond)[0].query_lens == (7,)


def test_a_token_that_the_step_in_flight_samples_is_read_on_the_device() -> None:
    inputs = make_inputs()
    batch = make_batch(inputs)
    a, b = decoding("a", 5, 20), decoding("b", 2, 30)
    before = stage(batch, a, b)
    inputs.upload(before)
    rows = inputs.section("rows", 2).tolist()
    add_in_flight(a, 1)
    staged = stage(batch, b, a)  # b's token is known: it is not in flight
    assert staged.staging != before.staging
    inputs.last_tokens[rows[0]] = 77
    inputs.upload(staged)
    assert input_ids(inputs, 2) == [11, 77]
    assert inputs.section("positions", 2).tolist() == [1, 5]
    expected = sampling_input([b, a])
    assert staged.sampling.request_ids == ("b", "a")
    assert staged.sampling.keys[0].tolist() == expected.keys[0].tolist()
    assert staged.sampling.keys[1].tolist() != expected.keys[1].tolist()  # one position on


def test_addresses_do_not_change() -> None:
    inputs = make_inputs()
    batch = make_batch(inputs)

    def addresses() -> list[int]:
        (metadata,) = inputs.metadata(2)
        tensors = [
            *(inputs.section(name, 2) for name in ("token_index", "positions", "rows")),
            *inputs.sampling_tensors(2).values(),
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.slot_mapping,
            metadata.block_table,
            inputs.source,
        ]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    assert all(address % 16 == 0 for address in before)
    for num_tokens in (3, 9):
        inputs.upload(stage(batch, decoding(f"r{num_tokens}", num_tokens, 20)))
        assert addresses() == before


def test_a_step_of_prompts_or_too_many_requests_is_not_staged() -> None:
    batch = make_batch(make_inputs())
    prompt = make_request("p", 4)
    prompt.block_ids = [1, 2, 3]
    assert isinstance(batch.fill_or_stage(plan(prompt, num_tokens=4)), PreparedStep)
    assert isinstance(batch.fill_or_stage(plan(prompt)), PreparedStep)
    many = plan(*(decoding(f"r{i}", 3, 3 * i) for i in range(6)))
    assert isinstance(batch.fill_or_stage(many), PreparedStep)


def test_an_eager_step_names_the_tokens_it_does_not_know() -> None:
    batch = make_batch(make_inputs())
    a, b = decoding("a", 5, 20), decoding("b", 4, 30)
    batch.fill(plan(a))
    add_in_flight(a, 1)
    prepared = batch.fill(plan(b, a))
    assert prepared.model.input_ids.tolist() == [13, 0]
    assert prepared.pending_tokens is not None
    places, rows = prepared.pending_tokens
    assert places.tolist() == [1]
    assert rows.tolist() == prepared.sampling_rows.tolist()[1:]


def test_sampling_parameters_as_the_kernel_takes_them() -> None:
    requests = [
        decoding("a", 3, 0, temperature=0.0),
        decoding("bb", 3, 3, temperature=1e-9, top_k=5, top_p=0.5, min_p=0.25),
    ]
    sampling = sampling_input(requests)
    arrays = kernel_arrays(sampling.parameters, sampling.keys)
    assert arrays["temperatures"].tolist() == [0, np.float32(1e-6)]
    assert arrays["top_k"].tolist() == [0, 5]
    tensors = upload_parameters(sampling.parameters, sampling.keys, CPU)
    assert list(tensors) == list(PARAMETER_TYPES)
    for name, tensor in tensors.items():
        assert tensor.dtype == PARAMETER_TYPES[name]
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])


def test_parameters_are_made_what_the_kernel_takes_once_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def count(parameters: npt.NDArray[np.void]) -> dict[str, npt.NDArray[np.generic]]:
        made.append(len(parameters))
        return kernel_parameters(parameters)

    for module in (device_sampling, request_rows):
        monkeypatch.setattr(module, "kernel_parameters", count, raising=False)
    inputs = make_inputs()
    batch = make_batch(inputs)
    made.clear()
    requests = [decoding(name, 5, 10 * i, temperature=0.5, top_k=7) for i, name in enumerate("ab")]
    for _ in range(3):
        inputs.upload(stage(batch, *requests))
    assert made == [1, 1]
    assert inputs.sampling_tensors(2)["top_k"].tolist() == [7, 7]
    for other in "cdefg":  # one more than there are rows: a row is another request's
        inputs.upload(stage(batch, decoding(other, 5, 60, temperature=0.5, top_k=9)))
    assert inputs.sampling_tensors(1)["top_k"].tolist() == [9]
    assert made == [1] * 7


@pytest.mark.parametrize("num_requests", range(1, 7))
def test_uploaded_parameters_begin_where_triton_takes_them_for_aligned(num_requests: int) -> None:
    sampling = sampling_input([decoding(f"r{i}", 3, 3 * i) for i in range(num_requests)])
    tensors = upload_parameters(sampling.parameters, sampling.keys, CPU)
    start = tensors["temperatures"].data_ptr()
    assert [(tensor.data_ptr() - start) % 16 for tensor in tensors.values()] == [0] * 5
    for name, array in kernel_arrays(sampling.parameters, sampling.keys).items():
        np.testing.assert_array_equal(tensors[name].numpy(), array)


@pytest.mark.parametrize("option", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_peers_cannot_map_is_refused(option: str) -> None:
    check_allocator({option: "max_split_size_mb:64,expandable_segments:False"})
    with pytest.raises(ConfigError, match=f"^{option}: expandable_segments"):
        check_allocator({option: "backend:native, expandable_segments:True"})
