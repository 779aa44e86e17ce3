"""State machine over Scheduler: with very few blocks, no request is lost, repeated or leaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.api.errors import InvalidRequestError
from baton.api.pooling import PoolingKind, PoolingParams
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine.core.block_pool import BlocksRemoved, BlocksStored
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput, StepResult
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.sampling.grammar_compiler import GrammarCompiler
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.engine_parts import (
    EOS,
    ContentRunner,
    extended,
    make_request,
    make_scheduler,
)

NUM_BLOCKS = 8  # in each KV cache group, the null block included
BLOCK_SIZE = 2
MAX_MODEL_LEN = NUM_BLOCKS * BLOCK_SIZE
LONGEST = 15
COMPILER = GrammarCompiler(DEMO_MODEL, 4096, frozenset({4093, 4095}))
ANYTHING = StructuredOutput(regex="(?s:.*)")  # the tokens of these tests are chosen by hand

# Short ones run side by side and preempt each other; long ones fill the pool alone.
shared_lengths = st.integers(1, 5) | st.integers(1, 5) | st.integers(1, LONGEST)
own_lengths = st.integers(0, 2) | st.integers(0, 2) | st.integers(0, LONGEST)
salts = st.sampled_from([(), (b"salt",)])


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, remote KV, aborts and steps; then everything must drain.

    The runner knows what each KV slot holds: reading another prefix's content fails there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler
        self.requests: dict[str, Request] = {}  # all that ever came
        self.outputs: dict[
            str, list[int]
        ] = {}  # token ids by index, the remote node's first one too
        self.ended: dict[str, str] = {}  # request_id -> how; set exactly once
        self.just_committed: set[str] = set()

    @initialize(
        max_num_requests=st.integers(1, 4),
        max_num_batched_tokens=st.integers(4, 20),
        long_prefill_token_threshold=st.integers(1, 20),
        prefill_tokens_beside_decodes=st.integers(1, 20),
        prefix_cache=st.booleans(),
        sliding_windows=st.sampled_from([(None,), (1,), (2,), (5,), (8,)])
        | st.lists(st.sampled_from([None, 1, 2, 3, 5, 8]), min_size=1, max_size=3),
        num_drafts=st.sampled_from([0, 1, 3]),
        by_priority=st.booleans(),
    )
    def make(
        self,
        max_num_requests: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int,
        prefill_tokens_beside_decodes: int,
        prefix_cache: bool,
        sliding_windows: Sequence[int | None],
        num_drafts: int,
        by_priority: bool,
    ) -> None:
        self.num_drafts = num_drafts
        self.max_num_requests = max_num_requests
        self.budget = max_num_batched_tokens
        self.threshold = long_prefill_token_threshold
        self.beside_decodes = prefill_tokens_beside_decodes
        self.windows, self.num_groups = sliding_windows, len(sliding_windows)
        self.num_blocks = NUM_BLOCKS * self.num_groups
        self.num_null_blocks = int(any(window is not None for window in sliding_windows))
        # The null block costs all groups one of theirs.
        self.max_model_len = MAX_MODEL_LEN - self.num_null_blocks * BLOCK_SIZE
        self.runner = ContentRunner(BLOCK_SIZE, sliding_windows)
        self.scheduler = make_scheduler(
            self.num_blocks,
            BLOCK_SIZE,
            max_num_requests=max_num_requests,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            prefill_tokens_beside_decodes=prefill_tokens_beside_decodes,
            prefix_cache=prefix_cache,
            sliding_windows=sliding_windows,
            by_priority=by_priority,
        )

    def new_request(
        self,
        prompt: list[int],
        max_tokens: int,
        extra_keys: tuple[bytes, ...],
        structured: bool = False,
        pooling: PoolingParams | None = None,
    ) -> Request:
        request = make_request(
            f"r{len(self.requests)}",
            params=SamplingParams(
                max_tokens=max_tokens, structured_output=ANYTHING if structured else None
            ),
            max_model_len=self.max_model_len,
            prompt=prompt,
            extra_keys=extra_keys,
            priority=(len(self.requests) * 7) % 4 - 1,
            pooling=pooling,
        )
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def having(self, *statuses: RequestStatus) -> list[str]:
        return [r.request_id for r in self.scheduler.requests.values() if r.status in statuses]

    # ------------------------------------------------------------ what may happen

    @rule(
        num_shared=shared_lengths,
        num_own=own_lengths,
        max_tokens=st.integers(1, 12),
        salt=salts,
        structured=st.booleans(),
    )
    def add(
        self,
        num_shared: int,
        num_own: int,
        max_tokens: int,
        salt: tuple[bytes, ...],
        structured: bool,
    ) -> None:
        prompt = ([1] * num_shared + [3] * num_own)[: self.max_model_len - 1]
        self.scheduler.add_request(self.new_request(prompt, max_tokens, salt, structured))

    @rule(
        num_shared=shared_lengths,
        num_own=own_lengths,
        salt=salts,
        kind=st.sampled_from([PoolingKind.LAST, PoolingKind.MEAN]),
    )
    def add_pooled(
        self, num_shared: int, num_own: int, salt: tuple[bytes, ...], kind: PoolingKind
    ) -> None:
        prompt = ([1] * num_shared + [3] * num_own)[: self.max_model_len - 1]
        pooling = PoolingParams(kind)
        self.scheduler.add_request(self.new_request(prompt, 1, salt, pooling=pooling))

    @rule(
        num_prompt_tokens=st.integers(1, LONGEST - 1),
        num_siblings=st.integers(1, 3),
        max_tokens=st.integers(1, 6),
    )
    def add_siblings(self, num_prompt_tokens: int, num_siblings: int, max_tokens: int) -> None:
        prompt = ([1] * num_prompt_tokens)[: self.max_model_len - 1]
        first, *rest = (self.new_request(prompt, max_tokens, ()) for _ in range(num_siblings + 1))
        first.siblings = rest
        self.scheduler.add_request(first)

    @rule(data=st.data(), num_more=st.integers(0, 4), max_tokens=st.integers(1, 6))
    def add_the_next_turn(self, data: st.DataObject, num_more: int, max_tokens: int) -> None:
        if self.ended:
            before = self.requests[data.draw(st.sampled_from(sorted(self.ended)))]
            prompt = [*before.token_ids, *[4] * num_more][: self.max_model_len - 1]
            self.scheduler.add_request(self.new_request(prompt, max_tokens, before.extra_keys))

    @rule(
        num_shared=shared_lengths,
        num_own=own_lengths,
        max_tokens=st.integers(2, 12),
        salt=salts,
        structured=st.booleans(),
    )
    def park(
        self,
        num_shared: int,
        num_own: int,
        max_tokens: int,
        salt: tuple[bytes, ...],
        structured: bool,
    ) -> None:
        prompt = ([1] * num_shared + [3] * num_own)[: self.max_model_len - 2]
        self.scheduler.park(self.new_request(prompt, max_tokens, salt, structured))

    @rule(data=st.data(), compiles=st.sampled_from([True, True, False]))
    def compile(self, data: st.DataObject, compiles: bool) -> None:
        waiting = [r.request_id for r in self.scheduler.requests.values() if r.awaits_grammar]
        if waiting:
            self.compile_one(data.draw(st.sampled_from(waiting)), compiles)

    def compile_one(self, request_id: str, compiles: bool) -> None:
        request = self.requests[request_id]
        if compiles:
            was = request.status
            self.scheduler.set_grammar(request, COMPILER.compile_now(request.sampling_params))
            if was is RequestStatus.WAITING_FOR_GRAMMAR and request.block_ids:
                self.just_committed.add(request_id)
            return
        self.scheduler.set_grammar(request, InvalidRequestError("structured_output", "no"))
        assert [failed for failed, _ in self.scheduler.failures] == [request_id]
        self.scheduler.failures.clear()
        self.scheduler.abort(request_id)  # if it was parked
        self.end(request_id, "failed")

    @rule()
    def forget_all_prefixes(self) -> None:
        self.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()

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
        ref_counts = self.scheduler.kv_cache_manager.block_pool.ref_counts()
        if granted is None:
            assert self.scheduler.kv_cache_manager.block_pool.num_free == free
        else:
            num_tokens = request.num_prompt_tokens
            oldest = [0 if w is None else max(num_tokens - w + 1, 0) for w in self.windows]
            num_blocks = [-(-num_tokens // BLOCK_SIZE) - start // BLOCK_SIZE for start in oldest]
            block_ids = granted.block_ids
            assert len(set(block_ids)) == len(block_ids) == sum(num_blocks) - granted.first_block
            assert all(ref_counts[block_id] == 1 for block_id in block_ids)

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
        request = self.requests[request_id]
        self.runner.clear(request.block_ids)
        self.runner.write_what_travels(request)
        self.scheduler.commit(request_id, 5)
        self.outputs[request_id].append(5)
        if not request.awaits_grammar:
            self.just_committed.add(request_id)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.scheduler.requests:
            request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
            assert self.scheduler.abort(request_id) is self.requests[request_id]
            self.end(request_id, "aborted")

    @rule(
        seed=st.integers(0, 2**32),
        num_steps=st.integers(1, 6),
        abort_during=st.integers(0, 6),
    )
    def steps(self, seed: int, num_steps: int, abort_during: int) -> None:
        # Any token, the end token now and then.
        for index in range(1, num_steps + 1):
            self.one_step(
                lambda request: (seed + 7 * request.num_tokens) % (EOS + 1), index == abort_during
            )
            self.scheduler.check()

    def run(self, next_token: Callable[[Request], int], step: SchedulerOutput) -> ModelRunnerOutput:
        """Return a step's samples and drafts for the next one, some of them wrong."""

        def propose(request: Request) -> tuple[int, ...]:
            drafts: tuple[int, ...] = ()
            for _ in range(self.num_drafts):
                ahead = extended(request, drafts)
                is_wrong = ahead.num_tokens % 4 == 0
                drafts = (*drafts, next_token(ahead) + is_wrong)
            return drafts

        self.runner.next_token, self.runner.propose = next_token, propose
        return self.runner.execute(step)

    def one_step(self, next_token: Callable[[Request], int], abort_during: bool = False) -> None:
        running = self.having(RequestStatus.RUNNING)
        waiting = self.having(RequestStatus.WAITING)
        arrived = [r for r in waiting if self.requests[r].block_ids]  # remote KV, or a sibling's
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        self.check_scheduled(scheduled, running, arrived)
        output = self.run(next_token, scheduled)
        if abort_during and scheduled.scheduled:
            request_id = scheduled.scheduled[0].request.request_id
            self.scheduler.abort(request_id)
            self.end(request_id, "aborted")
        self.take(self.scheduler.update(scheduled, output))

    def check_scheduled(
        self, scheduled: SchedulerOutput, running: list[str], arrived: list[str]
    ) -> None:
        """``running``: who ran before this step; ``arrived``: who waited and had blocks."""
        ids = [item.request.request_id for item in scheduled.scheduled]
        assert len(set(ids)) == len(ids) <= self.max_num_requests
        sizes = [item.num_scheduled_tokens for item in scheduled.scheduled]
        assert scheduled.num_scheduled_tokens == sum(sizes) <= self.budget
        assert all(1 <= size <= self.threshold for size in sizes)
        missing = {
            item.request.request_id: item.request.num_tokens - item.request.num_computed_tokens
            for item in scheduled.scheduled
        }
        if any(missing[one] == 1 for one in ids if one in running or one in arrived):
            prompts = [
                item.num_scheduled_tokens - len(item.draft_token_ids)
                for item in scheduled.scheduled
                if missing[item.request.request_id] > 1
            ]
            assert sum(prompts) <= self.beside_decodes
        for item in scheduled.scheduled:
            request = item.request
            assert request.status is RequestStatus.RUNNING
            needed = request.num_computed_tokens + item.num_scheduled_tokens
            assert len(request.block_ids) * BLOCK_SIZE >= needed * self.num_groups
        if len(running) < self.max_num_requests and sum(sizes) < self.budget:
            preempted = set(running) - set(ids)
            lost = set(self.having(RequestStatus.PREEMPTED))
            waiting = self.just_committed - set(ids) - set(self.ended) - lost
            # With room in the batch, what was committed runs at once, having its blocks already;
            # a sibling before it may still need one.
            full = len(ids) == self.max_num_requests or not self.just_committed.issuperset(arrived)
            assert preempted or not waiting or full
        self.just_committed -= set(ids)
        written = [
            item.request.block_ids[block * self.num_groups + group]
            for item in scheduled.scheduled
            for block in {
                (item.request.num_computed_tokens + index) // BLOCK_SIZE
                for index in range(item.num_scheduled_tokens)
            }
            for group in range(self.num_groups)
        ]
        ref_counts = self.scheduler.kv_cache_manager.block_pool.ref_counts()
        assert all(ref_counts[block_id] == 1 for block_id in written)
        assert len(set(written)) == len(written)  # nobody computes into another's block

    def take(self, result: StepResult) -> None:
        """Check that outputs come without gap or repeat, and that the last one has a reason."""
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
        null_blocks = range(self.num_null_blocks)  # the first that was ever given out
        held = self.blocks_held()
        for block_id in null_blocks:
            held[block_id] = 1
        assert scheduler.kv_cache_manager.block_pool.ref_counts() == dict(held)
        assert set(scheduler.requests) == set(self.requests) - set(self.ended)

    def blocks_held(self) -> Counter[int]:
        """Count how often each block is in a request's table."""
        return Counter(b for r in self.scheduler.requests.values() for b in r.block_ids)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            for request_id in self.having(*RequestStatus):
                if self.requests[request_id].awaits_grammar:
                    self.compile_one(request_id, True)
            parked = self.having(RequestStatus.WAITING_FOR_REMOTE_KVS)
            for request_id in parked:
                if self.requests[request_id].block_ids or self.scheduler.grant(request_id):
                    self.commit_one(request_id)
            if self.drained():
                break
            self.one_step(lambda request: 2)
        assert set(self.ended) == set(self.requests)  # each exactly once: see `end`
        for request_id, request in self.requests.items():
            assert request.output_token_ids == self.outputs[request_id]
            if self.ended[request_id] == "length":
                assert request.num_tokens == request.max_num_tokens
            if self.ended[request_id] == "stop" and request.pooling is None:
                assert self.outputs[request_id][-1] == EOS
                assert EOS not in self.outputs[request_id][:-1]
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.num_free == self.num_blocks - self.num_null_blocks
        assert sum(pool.ref_counts().values()) == self.num_null_blocks
        self.check_events()

    def drained(self) -> bool:
        return not self.scheduler.requests

    def check_events(self) -> None:
        """Replayed, they give as many contents as there are."""
        pool = self.scheduler.kv_cache_manager.block_pool
        known: set[bytes] = set()
        for event in pool.take_events():
            if isinstance(event, BlocksStored):
                known.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                known.difference_update(event.hashes)
            else:
                known.clear()
        if self.num_groups == 1:  # events speak of the first group only
            assert len(known) == pool.num_cached
        assert all(pool.find(block_hash) is not None for block_hash in known)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
