"""State machine over Scheduler: with next to no memory, nothing is lost, repeated or leaked."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from tests.fakes.engine_parts import EOS, FakeRunner, make_request, make_scheduler

NUM_BLOCKS = 8
BLOCK_SIZE = 2
MAX_MODEL_LEN = NUM_BLOCKS * BLOCK_SIZE


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, remote KV, aborts and steps; then everything must drain."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler
        self.requests: dict[str, Request] = {}  # all that ever came
        self.outputs: dict[
            str, list[int]
        ] = {}  # token ids by index, the remote node's first one too
        self.ended: dict[str, str] = {}  # request_id -> how; set exactly once
        self.just_committed: set[str] = set()
        self.tokens = iter(())

    @initialize(
        max_num_requests=st.integers(1, 4),
        max_num_batched_tokens=st.integers(4, 20),
        long_prefill_threshold=st.integers(1, 20),
    )
    def make(
        self, max_num_requests: int, max_num_batched_tokens: int, long_prefill_threshold: int
    ) -> None:
        self.max_num_requests = max_num_requests
        self.budget = max_num_batched_tokens
        self.threshold = long_prefill_threshold
        self.scheduler = make_scheduler(
            NUM_BLOCKS,
            BLOCK_SIZE,
            max_num_requests=max_num_requests,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_threshold=long_prefill_threshold,
        )

    def new_request(self, num_prompt_tokens: int, max_tokens: int) -> Request:
        request = make_request(
            f"r{len(self.requests)}", num_prompt_tokens, max_tokens, max_model_len=MAX_MODEL_LEN
        )
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def having(self, *statuses: RequestStatus) -> list[str]:
        return [r.request_id for r in self.scheduler.requests.values() if r.status in statuses]

    # ------------------------------------------------------------ what may happen

    @rule(num_prompt_tokens=st.integers(1, MAX_MODEL_LEN - 1), max_tokens=st.integers(1, 12))
    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.scheduler.add(self.new_request(num_prompt_tokens, max_tokens))

    @rule(num_prompt_tokens=st.integers(1, MAX_MODEL_LEN - 2), max_tokens=st.integers(2, 12))
    def park(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.scheduler.park(self.new_request(num_prompt_tokens, max_tokens))

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        parked = [
            request_id
            for request_id in self.having(RequestStatus.WAITING_FOR_REMOTE_KVS)
            if not self.requests[request_id].block_ids
        ]
        if not parked:
            return
        request = self.requests[data.draw(st.sampled_from(parked))]
        free = self.scheduler.kv_cache_manager.block_pool.num_free
        granted = self.scheduler.grant(request.request_id)
        if granted is None:
            assert self.scheduler.kv_cache_manager.block_pool.num_free == free
        else:
            assert len(granted) == -(-request.num_prompt_tokens // BLOCK_SIZE)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        granted = [
            request_id
            for request_id in self.having(RequestStatus.WAITING_FOR_REMOTE_KVS)
            if self.requests[request_id].block_ids
        ]
        if granted:
            self.commit_one(data.draw(st.sampled_from(granted)))

    def commit_one(self, request_id: str) -> None:
        self.scheduler.commit(request_id, 5)
        self.outputs[request_id].append(5)
        self.just_committed.add(request_id)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.scheduler.requests:
            request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
            assert self.scheduler.abort(request_id) is self.requests[request_id]
            self.end(request_id, "aborted")

    @rule(seed=st.integers(0, 2**32), abort_during=st.booleans())
    def step(self, seed: int, abort_during: bool) -> None:
        # Any token, the end token now and then.
        self.one_step(lambda request: (seed + 7 * request.num_tokens) % (EOS + 1), abort_during)

    def one_step(self, next_token: object, abort_during: bool = False) -> None:
        assert callable(next_token)
        running = self.having(RequestStatus.RUNNING)
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        ids = [item.request.request_id for item in scheduled.scheduled]
        assert len(set(ids)) == len(ids) <= self.max_num_requests
        sizes = [item.num_scheduled_tokens for item in scheduled.scheduled]
        assert scheduled.num_scheduled_tokens == sum(sizes) <= self.budget
        assert all(1 <= size <= self.threshold for size in sizes)
        for item in scheduled.scheduled:
            request = item.request
            assert request.status is RequestStatus.RUNNING
            needed = request.num_computed_tokens + item.num_scheduled_tokens
            assert len(request.block_ids) * BLOCK_SIZE >= needed
        if len(running) < self.max_num_requests and sum(sizes) < self.budget:
            preempted = set(running) - set(ids)
            waiting = self.just_committed - set(ids) - set(self.ended)
            # With room in the batch, what was committed runs at once: it has its blocks already.
            assert preempted or not waiting or len(ids) == self.max_num_requests
        self.just_committed -= set(ids)
        blocks = [block for item in scheduled.scheduled for block in item.request.block_ids]
        assert len(set(blocks)) == len(blocks)  # nobody computes into another's block
        output = FakeRunner(next_token).execute(scheduled)
        if abort_during and ids:
            self.scheduler.abort(ids[0])
            self.end(ids[0], "aborted")
        result = self.scheduler.update(scheduled, output)
        for new in result.outputs:
            assert new.request_id not in self.ended
            assert new.output_index == len(self.outputs[new.request_id])
            self.outputs[new.request_id] += new.token_ids
            if new.finish_reason is not None:
                self.end(new.request_id, new.finish_reason.value)
        finished = [request.request_id for request in result.finished]
        assert finished == [o.request_id for o in result.outputs if o.finish_reason is not None]

    def end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = how

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_is_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.check()
        held = sum(len(request.block_ids) for request in scheduler.requests.values())
        assert scheduler.kv_cache_manager.block_pool.num_references() == held
        assert set(scheduler.requests) == set(self.requests) - set(self.ended)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            parked = self.having(RequestStatus.WAITING_FOR_REMOTE_KVS)
            for request_id in parked:
                if self.requests[request_id].block_ids or self.scheduler.grant(request_id):
                    self.commit_one(request_id)
            if not self.scheduler.requests:
                break
            self.one_step(lambda request: 2)
        assert set(self.ended) == set(self.requests)  # each exactly once: see `end`
        for request_id, request in self.requests.items():
            assert request.output_token_ids == self.outputs[request_id]
            if self.ended[request_id] == "length":
                assert request.num_tokens == request.max_num_tokens
            if self.ended[request_id] == "stop":
                assert self.outputs[request_id][-1] == EOS
                assert EOS not in self.outputs[request_id][:-1]
        pool = self.scheduler.kv_cache_manager.block_pool
        assert (pool.num_free, pool.num_references()) == (NUM_BLOCKS, 0)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
