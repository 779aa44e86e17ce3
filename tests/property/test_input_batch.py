"""State machine over Scheduler and InputBatch: kept rows equal rows that are filled anew."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from baton.api.sampling_params import SamplingParams
from engine.core.outputs import ScheduledRequest
from engine.core.step_plan import NewBlocks, StepPlan, StepPlanner
from engine.worker.input_batch import InputBatch
from engine.worker.inputs.prepared_step import PreparedStep
from tests.fakes.engine.engine_parts import FakeRunner, extended, make_request, make_scheduler
from tests.fakes.engine.prepared_steps import attention_groups
from tests.fakes.engine.sampling import random_words, sampling_input

NUM_BLOCKS = 9
BLOCK_SIZE = 2
MAX_MODEL_LEN = (NUM_BLOCKS - 1) * BLOCK_SIZE
MAX_NUM_REQUESTS = 3

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    logprobs=st.none() | st.integers(0, 3),
    prompt_logprobs=st.none() | st.none() | st.integers(0, 3),
)


def queries(scheduled: tuple[ScheduledRequest, ...]) -> list[tuple[ScheduledRequest, int, int]]:
    """Return the spans of tokens that attend together; in a decode step each draft is alone."""
    num_tokens = sum(item.num_scheduled_tokens for item in scheduled)
    is_decode = all(
        i.samples and i.num_scheduled_tokens == 1 + len(i.draft_token_ids) for i in scheduled
    )
    found = []
    for item in scheduled:
        start = item.request.num_computed_tokens
        end = start + item.num_scheduled_tokens
        step = 1 if is_decode and num_tokens <= MAX_NUM_REQUESTS else end - start
        found += [(item, position, position + step) for position in range(start, end, step)]
    return found


def simple_fill(
    scheduled: tuple[ScheduledRequest, ...], group: int, num_groups: int
) -> dict[str, list[int]]:
    """Compute the step's tensors by definition, one request and one token at a time."""
    tensors: dict[str, list[int]] = {
        name: []
        for name in (
            "input_ids",
            "positions",
            "slot_mapping",
            "query_start_loc",
            "seq_lens",
            "last_token_rows",
        )
    }
    tensors["query_start_loc"].append(0)
    for item, start, end in queries(scheduled):
        request = item.request
        for position in range(start, end):
            block_id = request.block_ids[position // BLOCK_SIZE * num_groups + group]
            tensors["input_ids"].append([*request.token_ids, *item.draft_token_ids][position])
            tensors["positions"].append(position)
            tensors["slot_mapping"].append(block_id * BLOCK_SIZE + position % BLOCK_SIZE)
        tensors["query_start_loc"].append(len(tensors["input_ids"]))
        tensors["seq_lens"].append(end)
        first = len(tensors["input_ids"]) - (end - start)
        tensors["last_token_rows"] += [
            first + position - start
            for position in range(start, end)
            if position >= request.num_tokens - 1  # the last known token, and drafts
        ]
    return tensors


def assert_filled(prepared: PreparedStep, scheduled: tuple[ScheduledRequest, ...]) -> None:
    """Check that the prepared step equals the simple one."""
    for group in range(len(attention_groups(prepared))):
        assert_group_filled(prepared, scheduled, group)
    sampling = sampling_input(
        [
            extended(item.request, item.draft_token_ids[:num_drafts])
            for item in scheduled
            if item.samples
            for num_drafts in range(len(item.draft_token_ids) + 1)
        ]
    )
    drafts = [draft for i in scheduled if i.samples for draft in (*i.draft_token_ids, -1)]
    has_drafts = any(item.draft_token_ids for item in scheduled)
    assert prepared.sampling.draft_token_ids == (tuple(drafts) if has_drafts else ())
    rows = [
        item.request.row for item in scheduled if item.samples for _ in (*item.draft_token_ids, -1)
    ]
    assert prepared.sampling_rows.tolist() == rows
    assert prepared.sampling.request_ids == sampling.request_ids
    assert prepared.sampling.adjusted == sampling.adjusted
    np.testing.assert_array_equal(prepared.sampling.parameters, sampling.parameters)
    if not sampling.is_greedy:  # else nobody reads them
        np.testing.assert_array_equal(prepared.sampling.keys, sampling.keys)


def assert_group_filled(
    prepared: PreparedStep, scheduled: tuple[ScheduledRequest, ...], group: int
) -> None:
    model, attention = prepared.model, attention_groups(prepared)[group]
    num_groups = len(attention_groups(prepared))
    found = {
        "input_ids": model.input_ids,
        "positions": model.positions,
        "slot_mapping": attention.slot_mapping,
        "query_start_loc": attention.query_start_loc,
        "seq_lens": attention.seq_lens,
        "last_token_rows": model.last_token_rows,
    }
    expected = simple_fill(scheduled, group, num_groups)
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected
    parts = queries(scheduled)
    assert attention.num_requests == len(parts)
    assert attention.num_tokens == len(expected["input_ids"])
    assert attention.seq_lens_host == tuple(expected["seq_lens"])
    assert attention.query_lens == tuple(end - start for _, start, end in parts)
    assert attention.max_query_len == max(attention.query_lens)
    assert attention.max_seq_len == max(attention.seq_lens_host)
    for row, (item, _, _) in enumerate(parts):
        num_blocks = -(-attention.seq_lens_host[row] // BLOCK_SIZE)
        own = item.request.block_ids[group::num_groups]
        assert attention.block_table[row].tolist()[:num_blocks] == own[:num_blocks]


class InputBatchMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, reused ids, chunks, and preemptions for lack of blocks."""

    @initialize(
        max_num_batched_tokens=st.integers(4, 20),
        long_prefill_token_threshold=st.integers(1, 20),
        prefill_tokens_beside_decodes=st.integers(1, 20),
        prefix_cache=st.booleans(),
        windows=st.sampled_from([[None], [3], [5], [None, 3], [3, None, 5]]),
        num_drafts=st.integers(0, 3),
    )
    def make(
        self,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int,
        prefill_tokens_beside_decodes: int,
        prefix_cache: bool,
        windows: list[int | None],
        num_drafts: int,
    ) -> None:
        self.runner = FakeRunner(
            lambda request: 2 + len(request.token_ids) % 5,
            # The first is right, the second sometimes, and what comes behind that one.
            lambda request: tuple(
                2 + (request.num_tokens + index - (index > request.num_tokens % 3)) % 5
                for index in range(num_drafts)
            ),
        )
        self.scheduler = make_scheduler(
            NUM_BLOCKS * len(windows),
            BLOCK_SIZE,
            max_num_requests=MAX_NUM_REQUESTS,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            prefill_tokens_beside_decodes=prefill_tokens_beside_decodes,
            prefix_cache=prefix_cache,
            sliding_windows=windows,
        )
        self.input_batch = InputBatch(
            max_num_requests=MAX_NUM_REQUESTS,
            max_num_tokens=max_num_batched_tokens,
            sliding_windows=windows,
            max_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
        )
        self.num_seeds = 0

    @rule(
        name=st.sampled_from("abcde"),
        num_tokens=st.integers(1, 9),
        token_id=st.integers(10, 12),
        params=params,
    )
    def add(self, name: str, num_tokens: int, token_id: int, params: SamplingParams) -> None:
        if name not in self.scheduler.requests:
            self.num_seeds += 1
            self.scheduler.add_request(
                make_request(
                    name,
                    prompt=[token_id] * num_tokens,
                    params=params,
                    seed=-self.num_seeds,
                    max_model_len=MAX_MODEL_LEN,
                )
            )

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.scheduler.requests:
            self.scheduler.abort(data.draw(st.sampled_from(sorted(self.scheduler.requests))))

    @rule(name=st.sampled_from("vwxyz"))
    def receive(self, name: str) -> None:
        """Add a request whose prompt KV came from another node."""
        if name not in self.scheduler.requests:
            self.scheduler.park(make_request(name, 5, 4, max_model_len=MAX_MODEL_LEN))
            if self.scheduler.grant(name) is None:
                self.scheduler.abort(name)
            else:
                self.scheduler.commit(name, 7)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            scheduled = self.scheduler.schedule()
            if scheduled.scheduled:
                prepared = self.input_batch.fill(self.scheduler.plan(scheduled)[0])
                assert_filled(prepared, scheduled.scheduled)
            self.scheduler.update(scheduled, self.runner.execute(scheduled))

    @rule()
    def step_and_abort_meanwhile(self) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled.scheduled:
            prepared = self.input_batch.fill(self.scheduler.plan(scheduled)[0])
            assert_filled(prepared, scheduled.scheduled)
            self.scheduler.abort(scheduled.scheduled[0].request.request_id)
        self.scheduler.update(scheduled, self.runner.execute(scheduled))

    def teardown(self) -> None:
        rows = [r.row for r in self.scheduler.requests.values() if r.row >= 0]
        free_rows = self.scheduler._planner._free_rows
        assert sorted([*rows, *free_rows]) == list(range(MAX_NUM_REQUESTS))


TestInputBatch = InputBatchMachine.TestCase
TestInputBatch.settings = settings(max_examples=150, stateful_step_count=30)


# ---------------------------------------------------------------- corners


@pytest.fixture
def input_batch() -> InputBatch:
    return InputBatch(
        max_num_requests=2,
        max_num_tokens=16,
        max_blocks=8,
        block_size=2,
        device=torch.device("cpu"),
    )


@pytest.fixture
def planner() -> StepPlanner:
    return StepPlanner(2)


def test_a_preempted_request_that_comes_back_with_as_many_other_blocks_gets_those(
    input_batch: InputBatch, planner: StepPlanner
) -> None:
    request = make_request("a", 4)
    for block_ids in ([3, 4], [6, 5]):
        request.block_ids = block_ids
        prepared = input_batch.fill(planner.plan([ScheduledRequest(request, 4)]))
        assert attention_groups(prepared)[0].block_table.tolist() == [block_ids]
        planner.leave(request)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_decode_step_is_written_over_that_of_the_same_requests(
    planner: StepPlanner, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "BLOCK_SIZE", 4)  # more than steps between two in a buffer
    cpu = torch.device("cpu")
    batch = InputBatch(
        max_num_requests=2, max_num_tokens=16, max_blocks=8, block_size=4, device=cpu
    )
    filled = []

    fill = InputBatch._fill

    def note(self: InputBatch, columns: Any, images: Any = None) -> PreparedStep:
        filled.append(columns)
        return fill(self, columns, images)

    monkeypatch.setattr(InputBatch, "_fill", note)
    params = SamplingParams(temperature=temperature, seed=1)
    requests = [make_request(name, n, params=params) for name, n in (("a", 3), ("b", 9))]
    for step in range(8):
        for first, request in zip((2, 20), requests, strict=True):
            num_blocks = -(-request.num_tokens // BLOCK_SIZE)
            request.block_ids = list(range(first, first + num_blocks))
        items = tuple(
            ScheduledRequest(request, request.num_tokens - request.num_computed_tokens)
            for request in requests
        )
        assert_filled(batch.fill(planner.plan(items)), items)
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            request.token_ids.append(5 + step)
    assert len(filled) == 3  # the prompts, and a decode step in each set of buffers


def test_another_request_of_the_same_id_is_another_one(
    input_batch: InputBatch, planner: StepPlanner
) -> None:
    for block_ids, seed in (([3, 4], 1), ([6, 5], 2)):
        request = make_request("a", 4, seed=seed)
        request.block_ids = block_ids
        prepared = input_batch.fill(planner.plan([ScheduledRequest(request, 4)]))
        assert attention_groups(prepared)[0].block_table.tolist() == [block_ids]
        assert prepared.sampling.parameters["seed"].tolist() == [seed]


def test_a_plan_is_plain_values_and_says_only_what_is_new(planner: StepPlanner) -> None:
    request = make_request("a", 4)
    request.block_ids = [3, 4]
    first = planner.plan([ScheduledRequest(request, 4)])
    assert (first.shares, first.token_ids) == ([1, 0, 4, 4], [1] * 4)
    assert first.new_blocks == (NewBlocks(1, [3, 4]),)
    request.token_ids.append(7)
    request.num_computed_tokens = 4
    request.block_ids.append(9)
    second = planner.plan([ScheduledRequest(request, 1)])
    assert (second.new_rows, second.new_blocks) == ((), (NewBlocks(1, [9]),))
    assert (second.shares, second.token_ids) == ([1, 4, 1, 5], [7])
    for plan in (first, second):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_a_prepared_step_does_not_change_when_its_requests_do(
    input_batch: InputBatch, planner: StepPlanner
) -> None:
    request = make_request(
        "a", 4, params=SamplingParams(presence_penalty=1.0, prompt_logprobs=2), seed=3
    )
    request.block_ids = [3, 4]
    prepared = input_batch.fill(planner.plan([ScheduledRequest(request, 4)]))
    request.token_ids += [8, 8]
    request.num_computed_tokens = 4
    request.block_ids.append(7)
    assert prepared.sampling.keys.tolist() == [random_words(3, 0)]
    assert prepared.sampling.adjusted[0].token_ids == [1] * 4
    assert prepared.prompt_rows[0].token_ids == (1, 1, 1)
    assert attention_groups(prepared)[0].block_table.tolist() == [[3, 4]]
