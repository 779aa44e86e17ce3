"""SimDecodeJob: one decode command on its way through a simulated decode node."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.api.outputs import DecodeReceipt, PushReceipt
from baton.block_hash import BlockHash
from baton.link.words import DecodeCommand
from sim_node.kv_cache import Holding
from sim_node.kv_network import TRANSPORT

NO_PUSH = PushReceipt(num_bytes=0, num_blocks=0, transport=TRANSPORT, exposed_transfer_s=0.0)

Name = tuple[str, int]  # request id, epoch


@dataclass(slots=True, eq=False)
class SimDecodeJob:
    """One decode command on its way; ``push`` is set when its KV is there.

    Attributes:
        token_ids: of prompt and output.
        index: of the next output token.
        max_index: behind the last one.
        room: tokens that its blocks hold.
        num_missing: tokens to be computed here before the first one can be sampled.
        chunk: of these, in the step in flight.
        num_computed_here: of the prompt, so far.
    """

    command: DecodeCommand
    key: int
    token_ids: list[int] = field(repr=False)
    hashes: list[BlockHash] = field(repr=False)
    parked_at: float
    index: int
    max_index: int
    holding: Holding | None = None
    room: int = 0
    num_cached: int = 0
    num_missing: int = 0
    chunk: int = 0
    num_computed_here: int = 0
    started: bool = False
    push: PushReceipt | None = None
    committed_at: float = 0.0
    num_steps_at_commit: int = 0
    first_step_s: float = 0.0
    steps_until_first: int = 0
    num_forwards: int = 0

    @property
    def name(self) -> Name:
        return self.command.request_id, self.command.epoch

    @property
    def is_alone(self) -> bool:
        """Whether the whole prompt is this node's to compute: nobody's KV will come."""
        return not self.command.prefill_engine_id

    def receipt(self) -> DecodeReceipt:
        """To be called when its KV is there."""
        assert self.push is not None
        return DecodeReceipt(
            parked_s=self.committed_at - self.parked_at,
            first_step_s=self.first_step_s,
            steps_until_first=self.steps_until_first,
            num_prompt_tokens_computed=self.num_computed_here,
            num_forwards=self.num_forwards,
            num_preemptions=0,
            push=self.push,
            num_cached_tokens=self.num_cached,
        )
