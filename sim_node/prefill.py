"""SimPrefill: the prefill half of the simulator.

    command -> queue -> chunks, one step at a time -> token 1 to the router -> KV to a decode node

First come first served, with a token budget per step, prefix hits and a limit of blocks; blocks are
held until the transfer's end. Transfers of one node share its link, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason, PrefillReceipt, PushReceipt, RequestOutput
from baton.block_hash import BlockHash
from baton.limits import NUM_LAYER_GROUPS
from baton.link.words import (
    AbortAll,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    PrefillCommand,
    RequestDelta,
)
from sim_node.kv_cache import Holding
from sim_node.kv_events import KVEventLog
from sim_node.kv_network import TRANSPORT, KVCommit, KVEnd, KVGrant, KVMessage, KVStart
from sim_node.node_parts import Command, NodeParts
from sim_node.sim_model import token_at

# The last layers of the last chunk are what can only travel when all is computed.


@dataclass(slots=True, eq=False)
class _Job:
    """One prefill command on its way; ``token_id`` is set when it is computed."""

    command: PrefillCommand
    key: int
    num_tokens: int
    hashes: list[BlockHash] = field(repr=False)
    received_at: float
    holding: Holding | None = None
    num_computed: int = 0
    num_cached: int = 0
    num_chunks: int = 0
    chunk: int = 0  # of the step in flight
    started_at: float = 0.0
    finished_at: float = 0.0
    token_id: int | None = None
    granted_at: float | None = None
    num_remote_cached: int = 0
    sending: bool = False

    @property
    def name(self) -> tuple[str, int]:
        return self.command.request_id, self.command.epoch


class SimPrefill:
    """Computes no prompts, in the time that it would take.

    Args:
        parts: of the node.
        log: of its prefix cache.
    """

    def __init__(self, parts: NodeParts, log: KVEventLog) -> None:
        self._parts = parts
        self._log = log
        self._jobs: dict[tuple[str, int], _Job] = {}  # all, by request id and epoch
        self._queue: list[_Job] = []  # not computed yet, oldest first
        self._batch: list[_Job] = []  # of the step in flight
        self._stepping = False
        self._link_free_at = 0.0

    # ------------------------------------------------------------------ in

    def take(self, command: Command) -> None:
        match command:
            case PrefillCommand():
                self._add(command)
            case CancelCommand():
                job = self._jobs.get((command.request_id, command.epoch))
                if job is not None:
                    self._end(job)
            case DecodeCommand():
                problem = "prefill: this is a prefill node"
                self._parts.fail(command.request_id, command.epoch, "INTERNAL", problem)

    def take_message(self, message: KVMessage) -> None:
        job = self._jobs.get((message.request_id, message.epoch))
        if job is None or message.engine_id != job.command.decode_engine_id:
            return
        if isinstance(message, KVGrant):
            job.granted_at = self._parts.clock.now()
            job.num_remote_cached = message.num_cached_tokens
            self._send_when_ready(job)
        elif isinstance(message, KVEnd):  # it wants it no more; the router knows
            self._end(job, tell_peer=False)

    def lose_peer(self, engine_id: str) -> None:
        for job in [j for j in self._jobs.values() if j.command.decode_engine_id == engine_id]:
            self._end(job, tell_peer=False)
            self._parts.fail(*job.name, "UNAVAILABLE", "prefill: its decode node is gone")

    def abort_all(self, abort: AbortAll) -> None:
        for job in [j for j in self._jobs.values() if abort.concerns(j.command.request_id)]:
            self._end(job)

    def expire(self) -> None:
        now = self._parts.clock.now()
        for job in list(self._jobs.values()):
            if now - job.received_at > job.command.timeout_s:
                self._end(job)
                self._parts.fail(*job.name, "DEADLINE_EXCEEDED", "prefill: deadline passed")

    def beat(self) -> NodeBeat:
        num_waiting = sum(job.holding is None for job in self._queue)
        return NodeBeat(
            num_waiting=num_waiting,
            num_running=len(self._queue) - num_waiting,
            num_free_blocks=self._parts.cache.num_free_blocks,
            num_transfers=len(self._jobs) - len(self._queue),
            num_uncomputed_tokens=sum(job.num_tokens - job.num_computed for job in self._queue),
        )

    def _add(self, command: PrefillCommand) -> None:
        parts = self._parts
        for job in [j for j in self._jobs.values() if j.command.request_id == command.request_id]:
            self._end(job)
        try:
            key = parts.check(command)
        except InvalidRequestError as error:
            parts.fail(command.request_id, command.epoch, "INVALID_ARGUMENT", str(error))
            return
        token_ids = [*command.prompt_token_ids, *command.output_token_ids]
        job = _Job(
            command,
            key,
            len(token_ids),
            parts.name_blocks([], token_ids, command),
            parts.clock.now(),
        )
        self._jobs[job.name] = job
        self._queue.append(job)
        if command.decode_engine_id:
            parts.network.send(
                command.decode_engine_id,
                KVStart(
                    request_id=command.request_id,
                    epoch=command.epoch,
                    engine_id=parts.engine_id,
                ),
            )
        if not self._stepping:
            self._begin_step(parts.clock.now())

    # ------------------------------------------------------------------ steps

    def _begin_step(self, now: float) -> None:
        """Give the step's tokens to the oldest; the timer of its end is the node's only one."""
        parts = self._parts
        budget, num_pairs = parts.options.max_num_batched_tokens, 0
        self._batch = []
        for job in self._queue:
            if budget == 0 or not self._has_blocks(job):
                break  # whoever came later must not overtake
            if not job.num_chunks:
                job.started_at = now
            job.chunk = min(budget, job.num_tokens - job.num_computed)
            job.num_chunks += 1
            budget -= job.chunk
            num_pairs += job.chunk * (2 * job.num_computed + job.chunk + 1) // 2
            self._batch.append(job)
        self._stepping = bool(self._batch)
        if self._batch:
            num_tokens = parts.options.max_num_batched_tokens - budget
            ends_at = now + parts.timing.prefill_s(num_tokens, num_pairs)
            parts.clock.call_at(ends_at, self._end_step)

    def _has_blocks(self, job: _Job) -> bool:
        """Whether a job has its blocks, taking them if there is room."""
        if job.holding is not None:
            return True
        cache, parts = self._parts.cache, self._parts
        # At least one token is computed: the next one comes of its logits.
        may_share = job.hashes[: (job.num_tokens - 1) // parts.hasher.block_size]
        num_cached = cache.num_cached(may_share)
        job.holding = cache.take(may_share, parts.num_blocks_for(job.num_tokens))
        if job.holding is None:
            return False
        job.num_cached = job.num_computed = num_cached * parts.hasher.block_size
        return True

    def _end_step(self, now: float) -> None:
        block_size = self._parts.hasher.block_size
        deltas = []
        for job in self._batch:
            if self._jobs.get(job.name) is not job:
                continue  # it ended meanwhile
            assert job.holding is not None
            job.num_computed += job.chunk
            self._parts.cache.name(job.holding, job.hashes[: job.num_computed // block_size])
            if job.num_computed == job.num_tokens:
                deltas.append(self._finish(job, now))
        self._queue = [job for job in self._queue if job.token_id is None]
        if deltas:
            self._parts.num_tokens_made += len(deltas)
            self._parts.emit(tuple(deltas))
        self._log.flush()
        self._begin_step(now)

    def _finish(self, job: _Job, now: float) -> RequestDelta:
        """Sample the token behind a prompt, and hand it over unless it is the last one."""
        command, parts = job.command, self._parts
        index = len(command.output_token_ids)
        job.token_id = token_at(job.key, index, parts.model.vocab_size)
        job.finished_at = now
        params = command.sampling_params
        is_stop = job.token_id in params.stop_token_ids and index + 1 >= params.min_tokens
        is_full = (
            index + 1 >= params.max_tokens
            or job.num_tokens + 1 >= parts.model.max_model_len
            or not command.decode_engine_id
        )
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH if is_full else None
        output = RequestOutput(command.request_id, index, (job.token_id,), reason)
        receipt = PrefillReceipt(
            queue_s=job.started_at - job.received_at,
            prefill_s=now - job.started_at,
            num_chunks=job.num_chunks,
            num_computed_tokens=job.num_tokens - job.num_cached,
            num_cached_tokens=min(job.num_cached, len(command.prompt_token_ids)),
        )
        if reason is None:
            self._send_when_ready(job)
        else:
            self._end(job)
        return RequestDelta(output, command.epoch, prefill=receipt)

    # ------------------------------------------------------------------ the hand-off

    def _send_when_ready(self, job: _Job) -> None:
        """Set the time of the commit, when both the grant and the token are there."""
        if job.granted_at is None or job.token_id is None or job.sending:
            return
        parts = self._parts
        timing = parts.timing
        num_sent = max(0, job.num_tokens - job.num_remote_cached)
        num_tail = min(num_sent, job.chunk) / NUM_LAYER_GROUPS
        # Blocks travel while later ones are computed, as soon as there is a grant.
        begins_at = max(job.granted_at, job.started_at, self._link_free_at)
        ends_at = max(
            begins_at + timing.transfer_s(num_sent),
            max(begins_at, job.finished_at) + timing.transfer_s(num_tail),
        )
        self._link_free_at = ends_at
        job.sending = True
        committed_at = max(ends_at + timing.link_latency_s, parts.clock.now())
        receipt = PushReceipt(
            num_bytes=num_sent * timing.kv_bytes_per_token,
            num_blocks=parts.num_blocks_for(num_sent),
            transport=TRANSPORT,
            exposed_transfer_s=committed_at - job.finished_at,
        )
        parts.clock.call_at(committed_at, lambda _: self._commit(job, receipt))

    def _commit(self, job: _Job, receipt: PushReceipt) -> None:
        if self._jobs.get(job.name) is not job:
            return  # it ended meanwhile
        assert job.token_id is not None
        self._end(job, tell_peer=False)
        commit = KVCommit(
            request_id=job.command.request_id,
            epoch=job.command.epoch,
            engine_id=self._parts.engine_id,
            token_id=job.token_id,
            receipt=receipt,
        )
        self._parts.network.send(job.command.decode_engine_id, commit)

    def _end(self, job: _Job, *, tell_peer: bool = True) -> None:
        """Forget a request and give its blocks back."""
        del self._jobs[job.name]
        if job.token_id is None:
            self._queue.remove(job)
        if job.holding is not None:
            self._parts.cache.free(job.holding)
            job.holding = None
        if tell_peer and job.command.decode_engine_id:
            request_id, epoch = job.name
            end = KVEnd(request_id=request_id, epoch=epoch, engine_id=self._parts.engine_id)
            self._parts.network.send(job.command.decode_engine_id, end)
        if self._queue and not self._stepping:  # it may have waited for these blocks
            self._begin_step(self._parts.clock.now())
