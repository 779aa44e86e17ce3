"""Request: one prompt on its way through an engine. Only the scheduler writes to it.

A request has known tokens (prompt and output so far) and computed tokens (their KV is in cache).
There are no phases: each step lets computed catch up with known.

    token_ids   [ prompt ................... | output ........ ]
                  computed ........|  to do                    ^ num_tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.api.outputs import FinishReason, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from baton.block_hash import BlockHash
from engine.core.grammar import GrammarState


class RequestStatus(Enum):
    """Where a request is.

    Attributes:
        finish_reason: of a request that has ended; None while it has not.
        is_finished: whether it has ended. Both are looked at several times per token, so they are
            plain attributes.
    """

    finish_reason: FinishReason | None
    is_finished: bool

    def __new__(cls, value: str, finish_reason: FinishReason | None = None) -> RequestStatus:
        status = object.__new__(cls)
        status._value_ = value
        status.finish_reason = finish_reason
        status.is_finished = finish_reason is not None
        return status

    WAITING = "WAITING"
    WAITING_FOR_REMOTE_KVS = "WAITING_FOR_REMOTE_KVS"
    WAITING_FOR_SHARED_KVS = "WAITING_FOR_SHARED_KVS"
    WAITING_FOR_GRAMMAR = "WAITING_FOR_GRAMMAR"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED_STOPPED = "FINISHED_STOPPED", FinishReason.STOP
    FINISHED_LENGTH = "FINISHED_LENGTH", FinishReason.LENGTH
    FINISHED_ABORTED = "FINISHED_ABORTED", FinishReason.ABORT


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt and what became of it.

    Attributes:
        token_ids: prompt, then output.
        seed: of the sampler; a request without one is given one where it enters the system.
        max_num_tokens: ends the output (``LENGTH``) when ``token_ids`` is that long.
        stop_token_ids: end the output (``STOP``).
        num_initial_tokens: known when it came: the prompt and what earlier attempts sampled. What
            is handed over from one node to another is the KV of these.
        changes_logits: see `SamplingParams.changes_logits`.
        grammar: what its output must look like, with the thought before that, and how far the
            output has come.
        extra_keys: what the KV depends on besides the tokens.
        epoch: which of a router's attempts it is; its output says so.
        rank: who goes first, and who is preempted last: the smaller one. The scheduler's.
        num_cached_tokens: found in the prefix cache when it was admitted or granted.
        num_cached_blocks: leading blocks whose content has a name in the prefix cache.
        block_hashes: of the leading full blocks of ``token_ids``, as far as they were needed.
        num_prompt_tokens_computed: prompt tokens computed by this engine, again and again if
            preempted. Stays 0 where all of the prompt's KV came from a remote node.
        num_forwards: steps that computed a part of this request.
        num_drafts: that were computed, of tokens that nobody had sampled.
        num_accepted_drafts: of them, those that the output goes on with.
        num_tokens_in_flight: tokens that steps (two at most) compute which have not ended.
        num_tokens_pending: tokens that they will sample; more than one of a step with drafts is
            not counted, and nothing is scheduled behind such a step before it ends.
        siblings: requests with the same prompt, that take its blocks once they are computed.
        is_drafted_for: whether who guesses reads it, where somebody must: from its first token on.
        row: that a worker keeps for it; -1: none. This and the next are `StepPlanner`'s.
        num_planned_blocks: blocks that the worker knows.
        started_at: when it was first scheduled (`time.monotonic`).
        prompt_logprobs: of the prompt tokens from the second on, as far as they were computed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    num_initial_tokens: int
    changes_logits: bool = False
    grammar: GrammarState | None = None
    extra_keys: tuple[bytes, ...] = ()
    epoch: int = 0
    rank: int = 0
    status: RequestStatus = RequestStatus.WAITING
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_preemptions: int = 0
    num_prompt_tokens_computed: int = 0
    num_forwards: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_tokens_in_flight: int = 0
    num_tokens_pending: int = 0
    siblings: list[Request] = field(default_factory=list)
    is_drafted_for: bool = True
    row: int = -1
    num_planned_blocks: int = 0
    started_at: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_tokens: int | None = None,
        output_token_ids: Sequence[int] = (),
        extra_keys: tuple[bytes, ...] = (),
        epoch: int = 0,
        grammar: GrammarState | None = None,
    ) -> Request:
        """Make a request from what a user gave.

        Args:
            max_tokens: fewer new tokens than ``sampling_params`` allows; a prefill node gives 1.
            output_token_ids: that earlier attempts sampled; the output goes on behind them.
            grammar: of its structured output, if it is compiled already.
        """
        stop_token_ids = frozenset(sampling_params.stop_token_ids)
        # Where a grammar lets the output end, an end token ends it.
        if not sampling_params.ignore_eos or sampling_params.structured_output is not None:
            stop_token_ids |= eos_token_ids
        num_prompt_tokens = len(prompt_token_ids)
        num_initial_tokens = num_prompt_tokens + len(output_token_ids)
        limit = num_prompt_tokens + sampling_params.max_tokens
        if max_tokens is not None:
            limit = min(limit, num_initial_tokens + max_tokens)
        return cls(
            request_id=request_id,
            token_ids=[*prompt_token_ids, *output_token_ids],
            num_prompt_tokens=num_prompt_tokens,
            sampling_params=sampling_params,
            seed=seed,
            num_initial_tokens=num_initial_tokens,
            max_num_tokens=min(limit, max_model_len),
            stop_token_ids=stop_token_ids,
            changes_logits=sampling_params.changes_logits,
            grammar=grammar,
            extra_keys=extra_keys,
            epoch=epoch,
        )

    @property
    def awaits_grammar(self) -> bool:
        """Whether it has a grammar that is not compiled yet."""
        return self.grammar is None and self.sampling_params.structured_output is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether they are asked for and still to be given: with the first output."""
        asks = self.sampling_params.prompt_logprobs is not None
        return asks and self.num_output_tokens == 0

    def begin(self, num_tokens: int) -> None:
        """A step that computes so many of its tokens has begun, or will behind another one."""
        self.num_tokens_in_flight += num_tokens
        end = self.num_computed_tokens + self.num_tokens_in_flight
        self.num_tokens_pending += end >= self.num_tokens + self.num_tokens_pending

    def keep_prompt_logprobs(self, first_position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add a chunk's; what was computed before a preemption is replaced."""
        self.prompt_logprobs[first_position - 1 :] = logprobs

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """One per prompt token, the first of them None; nothing where they are not wanted."""
        if not self.wants_prompt_logprobs:
            return ()
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return None, *taken

    def take_siblings(self) -> list[Request]:
        """Those of its siblings that have not ended; it has none from now on."""
        siblings, self.siblings = self.siblings, []
        return [sibling for sibling in siblings if not sibling.status.is_finished]

    def append(self, token_id: int) -> RequestStatus | None:
        """Add a sampled token; return how the output ends with the token, if the output does.

        A token that ends outputs is added as the closing mark of a thought whose answer must still
        come. Returns ABORTED, without the token, where the grammar refuses the token.
        """
        grammar = self.grammar
        if grammar is not None:
            token_id = grammar.corrected(token_id)
            if not grammar.accept(token_id):
                return RequestStatus.FINISHED_ABORTED
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids or (grammar is not None and grammar.is_terminated):
            return RequestStatus.FINISHED_STOPPED
        if len(self.token_ids) >= self.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
