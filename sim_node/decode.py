"""SimDecode: the decode half of the simulator.

    command -> parked -> room granted -> commit -> one token per step and request, to the router
    without a prefill node:  room -> chunks of the prompt in the steps of the others -> the same

One timer per node, whatever the batch, and one message per step. A request that finds no room for
its next block goes back to the router (PREEMPTED), the youngest first. What peers may still write
is not held back (no quarantine): a simulated write cannot come late.
"""

from __future__ import annotations

from collections import deque

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason, PushReceipt, RequestOutput
from baton.block_hash import BlockHash
from baton.link.words import (
    AbortAll,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    PrefillCommand,
    RequestDelta,
)
from sim_node.decode_job import NO_PUSH, Name, SimDecodeJob
from sim_node.kv_events import KVEventLog
from sim_node.kv_network import KVCommit, KVEnd, KVGrant, KVMessage, KVStart
from sim_node.node_parts import Command, NodeParts
from sim_node.sim_model import token_at

MAX_RECEIVING_REQUESTS = 64
# How long a START may come before its command, and how long an ended request is remembered.
MEMORY_S = 60.0


class SimDecode:
    """Decodes nothing, in the time that it would take.

    Args:
        parts: of the node.
        log: of its prefix cache.
    """

    def __init__(self, parts: NodeParts, log: KVEventLog) -> None:
        self._parts = parts
        self._log = log
        self._jobs: dict[Name, SimDecodeJob] = {}  # all
        self._wanting: deque[SimDecodeJob] = deque()  # started, and without room yet
        self._receiving: set[Name] = set()
        self._ready: deque[SimDecodeJob] = deque()
        self._running: list[SimDecodeJob] = []  # oldest first
        self._growing: list[SimDecodeJob] = []  # of those, who needs a block for the next step
        self._computing: list[SimDecodeJob] = []  # of those, whose prompt is not computed yet
        self._stepping = False
        self._num_steps = 0
        self._early_starts: dict[Name, tuple[float, str]] = {}
        self._ended: dict[Name, float] = {}

    # ------------------------------------------------------------------ in

    def take(self, command: Command) -> None:
        match command:
            case DecodeCommand():
                self._park(command)
            case CancelCommand():
                job = self._jobs.get((command.request_id, command.epoch))
                if job is not None:
                    self._end(job)
                    self._grant_waiting()
            case PrefillCommand():
                problem = "decode: this is a decode node"
                self._parts.fail(command.request_id, command.epoch, "INTERNAL", problem)

    def take_message(self, message: KVMessage) -> None:
        name = (message.request_id, message.epoch)
        job = self._jobs.get(name)
        if job is None:
            if not isinstance(message, KVStart):
                self._early_starts.pop(name, None)
            elif name in self._ended:
                self._tell_end(name, message.engine_id)
            else:
                self._early_starts[name] = (self._parts.clock.now(), message.engine_id)
        elif message.engine_id != job.command.prefill_engine_id:
            return
        elif isinstance(message, KVStart):
            if job.push is None:
                self._want_room(job)
            else:  # it is computed here
                self._tell_end(name, message.engine_id)
        elif job.push is not None:
            return
        elif isinstance(message, KVCommit):
            self._commit(job, message)
        elif isinstance(message, KVEnd):  # it ended on the prefill node; the router knows
            self._end(job, tell_peer=False)
            self._grant_waiting()

    def lose_peer(self, engine_id: str) -> None:
        for job in list(self._jobs.values()):
            if job.push is None and job.command.prefill_engine_id == engine_id:
                self._end(job, tell_peer=False)
                self._parts.fail(*job.name, "UNAVAILABLE", "decode: its prefill node is gone")
        self._grant_waiting()

    def abort_all(self, abort: AbortAll) -> None:
        for job in [j for j in self._jobs.values() if abort.concerns(j.command.request_id)]:
            self._end(job)

    def expire(self) -> None:
        now = self._parts.clock.now()
        for job in list(self._jobs.values()):
            if now - job.parked_at > job.command.timeout_s:
                self._end(job)
                self._parts.fail(*job.name, "DEADLINE_EXCEEDED", "decode: deadline passed")
        self._grant_waiting()
        oldest = now - MEMORY_S
        while self._early_starts and next(iter(self._early_starts.values()))[0] < oldest:
            del self._early_starts[next(iter(self._early_starts))]
        while self._ended and next(iter(self._ended.values())) < oldest:
            del self._ended[next(iter(self._ended))]

    def beat(self) -> NodeBeat:
        num_running, num_ready = len(self._running), len(self._ready)
        return NodeBeat(
            num_waiting=num_ready,
            num_waiting_for_remote_kvs=len(self._jobs) - num_running - num_ready,
            num_running=num_running,
            num_free_blocks=self._parts.cache.num_free_blocks,
            num_uncomputed_tokens=sum(job.num_missing for job in self._jobs.values()),
        )

    # ------------------------------------------------------------------ until the KV is there

    def _park(self, command: DecodeCommand) -> None:
        parts = self._parts
        for job in [j for j in self._jobs.values() if j.command.request_id == command.request_id]:
            self._end(job)
        try:
            key = parts.check(command)
        except InvalidRequestError as error:
            parts.fail(command.request_id, command.epoch, "INVALID_ARGUMENT", str(error))
            return
        token_ids = [*command.prompt_token_ids, *command.output_token_ids]
        longest = parts.model.max_model_len - len(command.prompt_token_ids)
        job = SimDecodeJob(
            command,
            key,
            token_ids,
            parts.name_blocks([], token_ids, command),
            parts.clock.now(),
            index=len(command.output_token_ids),
            max_index=min(command.sampling_params.max_tokens, longest),
        )
        self._jobs[job.name] = job
        _, starter = self._early_starts.pop(job.name, (0.0, ""))
        if job.is_alone:
            job.num_missing = len(token_ids) - self._num_cached(job)
            self._want_room(job)
        elif self._is_short(job):
            if starter:
                self._tell_end(job.name, starter)
            self._begin(job, NO_PUSH)
        elif starter == command.prefill_engine_id:
            self._want_room(job)

    def _is_short(self, job: SimDecodeJob) -> bool:
        """Whether so much is cached that the rest is computed here; if so it has its blocks."""
        parts, num_cached = self._parts, self._num_cached(job)
        num_missing = len(job.token_ids) - num_cached
        if not num_cached or num_missing > parts.options.local_prefill_threshold:
            return False
        num_begun = len(self._running) + len(self._ready)
        if num_begun >= parts.options.max_num_requests or not self._has_room(job):
            return False
        job.num_missing = num_missing
        return True

    def _may_share(self, job: SimDecodeJob) -> list[BlockHash]:
        """Names of blocks that need not be computed here: the next token needs one that is."""
        return job.hashes[: (len(job.token_ids) - 1) // self._parts.hasher.block_size]

    def _num_cached(self, job: SimDecodeJob) -> int:
        """Tokens that need not be computed here."""
        return self._parts.cache.num_cached(self._may_share(job)) * self._parts.hasher.block_size

    def _has_room(self, job: SimDecodeJob, *, received: bool = False) -> bool:
        """Take a job's blocks, if one for each running request is left."""
        parts = self._parts
        hashes = job.hashes if received else self._may_share(job)
        num_blocks = parts.num_blocks_for(len(job.token_ids))
        job.holding = parts.cache.take(hashes, num_blocks, headroom=len(self._running))
        if job.holding is None:
            return False
        job.num_cached = len(job.holding.hashes) * parts.hasher.block_size
        job.room = num_blocks * parts.hasher.block_size
        return True

    def _want_room(self, job: SimDecodeJob) -> None:
        if not job.started:
            job.started = True
            self._wanting.append(job)
            self._grant_waiting()

    def _grant_waiting(self) -> None:
        while self._wanting and len(self._receiving) < MAX_RECEIVING_REQUESTS:
            job = self._wanting[0]
            if not self._has_room(job, received=not job.is_alone):
                return
            self._wanting.popleft()
            if job.is_alone:
                job.num_missing = len(job.token_ids) - job.num_cached
                self._begin(job, NO_PUSH)
                continue
            self._receiving.add(job.name)
            request_id, epoch = job.name
            grant = KVGrant(
                request_id=request_id,
                epoch=epoch,
                engine_id=self._parts.engine_id,
                num_cached_tokens=job.num_cached,
            )
            self._parts.network.send(job.command.prefill_engine_id, grant)

    def _commit(self, job: SimDecodeJob, commit: KVCommit) -> None:
        assert job.holding is not None  # a prefill node commits what was granted
        self._receiving.discard(job.name)
        self._parts.cache.name(job.holding, job.hashes)
        job.token_ids.append(commit.token_id)
        job.index += 1
        self._begin(job, commit.receipt)
        self._grant_waiting()

    def _begin(self, job: SimDecodeJob, push: PushReceipt) -> None:
        """All that a request needs is here."""
        job.push = push
        job.committed_at = self._parts.clock.now()
        job.num_steps_at_commit = self._num_steps
        self._ready.append(job)
        if not self._stepping:
            self._begin_step(job.committed_at)

    # ------------------------------------------------------------------ steps

    def _begin_step(self, now: float) -> None:
        """Batch what is ready; the timer of the step's end is the node's only one."""
        parts = self._parts
        while self._ready and len(self._running) < parts.options.max_num_requests:
            job = self._ready.popleft()
            self._running.append(job)
            if job.num_missing:
                self._computing.append(job)
            if len(job.token_ids) > job.room:
                self._growing.append(job)
        growing, self._growing = self._growing, []
        for job in growing:
            self._grow(job)
        self._stepping = bool(self._running)
        if self._running:
            decoding = [len(job.token_ids) for job in self._running if not job.num_missing]
            step_s = parts.timing.decode_s(len(decoding), sum(decoding))
            if self._computing:
                step_s += parts.timing.compute_s(*self._take_chunks(len(decoding)))
            parts.clock.call_at(now + step_s, self._end_step)

    def _take_chunks(self, num_decoding: int) -> tuple[int, int]:
        """Give what the decoding requests leave of the step's tokens to the oldest prompts.

        Returns: tokens, and (query, key) pairs of them.
        """
        left = max(self._parts.options.max_num_batched_tokens - num_decoding, 1)
        num_tokens = num_pairs = 0
        for job in self._computing:
            num_before = len(job.token_ids) - job.num_missing
            job.chunk = min(left, job.num_missing)
            left -= job.chunk
            num_tokens += job.chunk
            num_pairs += job.chunk * (2 * num_before + job.chunk + 1) // 2
        return num_tokens, num_pairs

    def _grow(self, job: SimDecodeJob) -> None:
        """One block more, at the cost of the youngest requests if need be."""
        while job.holding is not None:
            if self._parts.cache.grow(job.holding):
                job.room += self._parts.hasher.block_size
                return
            youngest = self._running[-1]
            self._end(youngest)
            problem = "decode: preempted: older requests need its memory"
            self._parts.fail(*youngest.name, "PREEMPTED", problem)

    def _end_step(self, now: float) -> None:
        self._num_steps += 1
        vocab_size = self._parts.model.vocab_size
        deltas, finished = [], []
        for job in self._computing:
            job.num_missing -= job.chunk
            job.num_computed_here += job.chunk
            job.chunk = 0
        self._computing = [job for job in self._computing if job.num_missing]
        for job in self._running:
            if job.num_missing:
                continue
            index = job.index
            token_id = token_at(job.key, index, vocab_size)
            job.token_ids.append(token_id)
            job.index = index + 1
            job.num_forwards += 1
            if not job.steps_until_first:
                self._note_first(job, now)
            params = job.command.sampling_params
            reason = receipt = None
            if params.stop_token_ids and token_id in params.stop_token_ids:
                reason = FinishReason.STOP if job.index >= params.min_tokens else None
            if reason is None and job.index >= job.max_index:
                reason = FinishReason.LENGTH
            if reason is not None:
                finished.append(job)
                receipt = job.receipt()
            elif len(job.token_ids) > job.room:
                self._growing.append(job)
            request_id, epoch = job.name
            output = RequestOutput(request_id, index, (token_id,), reason)
            deltas.append(RequestDelta(output, epoch, decode=receipt))
        for job in finished:
            self._cache_output(job)
            self._end(job)
        if finished:
            self._log.flush()
        if deltas:
            self._parts.num_tokens_made += len(deltas)
            self._parts.emit(tuple(deltas))
        self._grant_waiting()
        self._begin_step(now)

    def _note_first(self, job: SimDecodeJob, now: float) -> None:
        job.first_step_s = now - job.committed_at
        job.steps_until_first = self._num_steps - job.num_steps_at_commit
        if job.num_computed_here:
            assert job.holding is not None
            self._parts.cache.name(job.holding, job.hashes)

    def _cache_output(self, job: SimDecodeJob) -> None:
        """Leave a finished request's blocks in the prefix cache, but for its last token's."""
        assert job.holding is not None
        self._parts.name_blocks(job.hashes, job.token_ids[:-1], job.command)
        self._parts.cache.name(job.holding, job.hashes)

    def _end(self, job: SimDecodeJob, *, tell_peer: bool = True) -> None:
        """Forget a request and give its blocks back."""
        name = job.name
        del self._jobs[name]
        self._ended[name] = self._parts.clock.now()
        self._receiving.discard(name)
        if job.push is None:
            if job in self._wanting:
                self._wanting.remove(job)
            if tell_peer:
                self._tell_end(name, job.command.prefill_engine_id)
        elif job in self._ready:
            self._ready.remove(job)
        else:
            self._running.remove(job)
            if job.num_missing:
                self._computing.remove(job)
        if job.holding is not None:
            self._parts.cache.free(job.holding)
            job.holding = None

    def _tell_end(self, name: Name, engine_id: str) -> None:
        end = KVEnd(request_id=name[0], epoch=name[1], engine_id=self._parts.engine_id)
        self._parts.network.send(engine_id, end)
