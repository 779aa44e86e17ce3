"""Request: one prompt on its way through an engine. The scheduler and its parts write to requests.

A request has known tokens (prompt and output so far) and computed tokens (their KV is cached).
There are no phases: in each step, computed tokens catch up with known tokens.

    token_ids   [ prompt ................... | output ........ ]
                  computed ........|  to do                    ^ num_tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.api.images import ImageSpan
from baton.api.outputs import FinishReason, TokenLogprobs
from baton.api.pooling import PoolingParams
from baton.api.sampling_params import SamplingParams
from baton.kv.block_hash import BlockHash, extra_keys_of
from engine.core.grammars.grammar import GrammarState
from engine.core.images.prompt_images import PromptImages


class RequestStatus(Enum):
    """The state of a request in the engine.

    Attributes:
        finish_reason: why the request has ended; None: it has not ended.
        is_finished: whether the request has ended. Both attributes are read several times per
            token.
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
    WAITING_FOR_PIXELS = "WAITING_FOR_PIXELS"
    WAITING_FOR_PREFIX = "WAITING_FOR_PREFIX"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED_STOPPED = "FINISHED_STOPPED", FinishReason.STOP
    FINISHED_LENGTH = "FINISHED_LENGTH", FinishReason.LENGTH
    FINISHED_ABORTED = "FINISHED_ABORTED", FinishReason.ABORT


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt, its output, and its progress.

    The first group of fields suffices for one engine, unconstrained output and synchronous steps.
    Each other group serves one feature.

    Attributes:
        token_ids: prompt, then output.
        seed: the sampler's seed, set when the request enters the system.
        max_num_tokens: length of ``token_ids`` at which the output ends (``LENGTH``).
        stop_token_ids: tokens that end the output (``STOP``).
        block_ids: blocks that hold the KV, in order (`kv_cache_coordinator.py`).
        num_computed_tokens: leading tokens whose KV is in the cache.

        priority: the client's priority; smaller values run first. See ``scheduling_policy``.
        rank: order of scheduling, set by the scheduler; the smallest rank is preempted last.
        row: row of the worker's batch that holds the request; -1: none. Set by `StepPlanner`.
        num_planned_blocks: blocks that the worker has been told of. Set by `StepPlanner`.
        num_tokens_in_flight: tokens that steps in flight compute (at most two, or one per stage).
        num_tokens_pending: tokens that steps in flight will sample, one per step. A step with
            drafts may sample more, so it must end before the request's next step is scheduled. With
            several pipeline stages, every step that samples for the request must end first.

        pooling: what to compute from the prompt's hidden states; None: sample tokens.

        adapter: digest of the adapter that computes the request; empty: the base model.
        extra_keys: values besides the tokens that the KV depends on, such as the adapter's digest.
        block_hashes: hashes of the leading full blocks of ``token_ids``, as far as computed.
        num_cached_blocks: number of leading blocks that are in the prefix cache.
        cache_class: highest class of cached blocks that the request may use; set by `Drafts`.
        awaits_prefix: whether the request waits until another node has sent a part of the prompt's
            KV to this node's prefix cache.

        images: images of the prompt, shared with sibling requests; None: the prompt is only text.

        num_initial_tokens: tokens known at the start: the prompt, and output tokens of earlier
            attempts. A hand-off between nodes moves the KV of these tokens.
        epoch: number of the router's attempt at the call; copied into each output.

        changes_logits: whether sampling changes logits by penalties, biases or bans; see
            `SamplingParams.changes_logits`.
        grammar: state of the output's grammar and of the thought (reasoning) before the answer;
            None: unconstrained, or not compiled yet.
        siblings: requests with the same prompt, which share the prompt's computed blocks.
        prompt_logprobs: logprobs of the prompt tokens from the second on, as far as computed.

        num_hit_tokens: tokens found in the prefix cache at admission or at the grant.
        num_pinned_tokens: prompt tokens that the request pinned; set by `PrefixPins`.
        num_preemptions: times that the request lost its blocks to another request.
        num_prompt_tokens_computed: prompt tokens that this engine computed, counted again after a
            preemption. Stays 0 if all of the prompt's KV came from a remote node.
        num_forwards: number of steps that computed tokens of this request.
        num_images_encoded: images that the engine encoded for this request.
        num_encodings_cached: images whose encodings were in the encoder cache.
        encoder_s: seconds in the image encoder during this request's steps, for any request.
        num_drafts: drafts that were computed for the request.
        num_accepted_drafts: computed drafts that became part of the output.
        started_at: when the request was first scheduled, in seconds of `time.monotonic`.
    """

    # Fields that every request needs.
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    status: RequestStatus = RequestStatus.WAITING
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    # The request's rank among requests, and its tokens in flight.
    priority: int = 0
    rank: int = 0
    row: int = -1
    num_planned_blocks: int = 0
    num_tokens_in_flight: int = 0
    num_tokens_pending: int = 0
    pooling: PoolingParams | None = None
    # The adapter, the prefix cache, and images.
    adapter: str = ""
    extra_keys: tuple[bytes, ...] = ()
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_cached_blocks: int = 0
    cache_class: int = 0
    awaits_prefix: bool = False
    images: PromptImages | None = None
    # Hand-offs and retries.
    num_initial_tokens: int
    epoch: int = 0
    # Features that sampling parameters ask for, such as a grammar.
    changes_logits: bool = False
    grammar: GrammarState | None = None
    siblings: list[Request] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Counts and times for receipts and metrics.
    num_hit_tokens: int = 0
    num_pinned_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens_computed: int = 0
    num_forwards: int = 0
    num_images_encoded: int = 0
    num_encodings_cached: int = 0
    encoder_s: float = 0.0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    started_at: float | None = None

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
        adapter: str = "",
        epoch: int = 0,
        priority: int = 0,
        grammar: GrammarState | None = None,
        images: PromptImages | None = None,
        pooling: PoolingParams | None = None,
    ) -> Request:
        """Make a request from a user's prompt and parameters.

        Args:
            max_tokens: maximum number of new tokens, if fewer than ``sampling_params`` allows.
            output_token_ids: output tokens of earlier attempts, which the output continues.
            extra_keys: values besides tokens and adapter that the KV depends on.
            adapter: digest of a loaded adapter; empty: the base model.
            grammar: the grammar's state, if the grammar is compiled already.
            images: the prompt's images; None: none.
            pooling: what to compute from the prompt's hidden states; None: sample tokens.
        """
        stop_token_ids = frozenset(sampling_params.stop_token_ids)
        # With a grammar, an end token ends the output even if `ignore_eos` is set.
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
            pooling=pooling,
            adapter=adapter,
            extra_keys=(*extra_keys, *extra_keys_of(b"", adapter)),
            images=images,
            epoch=epoch,
            priority=priority,
        )

    @property
    def image_spans(self) -> tuple[ImageSpan, ...]:
        """Return the token range of each image in the prompt, in order."""
        return () if self.images is None else self.images.spans

    def can_compute_from(self, num_cached_tokens: int) -> bool:
        """Return whether this engine has all inputs to compute the tokens after a cached prefix."""
        return self.images is None or self.images.may_compute_from(num_cached_tokens)

    @property
    def awaits_pixels(self) -> bool:
        """Return whether the request has images whose pixel values are not made yet."""
        return self.images is not None and self.images.awaits_pixels

    @property
    def awaits_grammar(self) -> bool:
        """Return whether the request has a grammar that is not compiled yet."""
        return self.grammar is None and self.sampling_params.structured_output is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_all_rows(self) -> bool:
        """Return whether every prompt token must be computed here, even if its KV is cached."""
        pools_all = self.pooling is not None and self.pooling.needs_all_rows
        return pools_all or self.wants_prompt_logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether the client asked for prompt logprobs and no output had them yet."""
        asks = self.sampling_params.prompt_logprobs is not None
        return asks and self.num_output_tokens == 0

    def keep_prompt_logprobs(self, first_position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Store a chunk's prompt logprobs; replace those that were computed before a preemption."""
        self.prompt_logprobs[first_position - 1 :] = logprobs

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Return the logprobs of each prompt token (None: the first); empty if not asked for."""
        if not self.wants_prompt_logprobs:
            return ()
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return None, *taken

    def take_siblings(self) -> list[Request]:
        """Remove all siblings from this request; return those that have not ended."""
        siblings, self.siblings = self.siblings, []
        return [sibling for sibling in siblings if not sibling.status.is_finished]

    def append(self, token_id: int) -> RequestStatus | None:
        """Add a sampled token; return the final status if the token ends the output, else None.

        An end token within a thought is replaced by the thought's closing mark if an answer must
        follow. If the grammar forbids the token, the token is not added, and FINISHED_ABORTED is
        returned.
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
