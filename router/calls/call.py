"""Call: a checked request and the terms of its client, as plain values."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from baton.access.identity import ANYBODY, Principal
from baton.api.beam_search import BeamSearchParams
from baton.api.images import ImageSpan, PromptImage
from baton.api.outputs import TextDelta
from baton.api.pooling import PoolingParams
from baton.api.sampling_params import SamplingParams
from baton.kv.pins import PinTerms
from baton.link.words import scoped_id
from baton.telemetry.spans import TraceContext
from baton.text.stop_strings import DEFAULT_TEXT, DetokenizeOptions
from router.calls.prompt_supply import PromptSupply
from router.fleet.adapter_places import NO_SOURCE, AdapterSource
from router.fleet.prefix.prompt_hashes import PromptHashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """All terms of a request, except the prompt and the sampling parameters.

    Attributes:
        received_at: when the request reached the router, by `time.perf_counter`.
        timeout_s: seconds from ``received_at`` to the client's deadline; None: no deadline.
        session_id: requests with the same session id share a prefix, so some policies send them to
            the same nodes; empty: no session.
        priority: order among the tenant's waiting requests; smaller numbers begin first.
        beams: parameters of a beam search, without end tokens; None: the outputs are sampled.
        principal: the caller.
        cache_word: the client's ``cache_salt``: prompts share cached blocks only if their words are
            equal; empty: no word.
        model: name under which the request is served, for receipts and records only; empty:
            unknown.
        adapter: digest of the adapter that the request's name stands for; empty: the base model.
        text_options: options for turning tokens into text.
        trace: the client's trace context; None: not traced.
        pins: prefixes that nodes keep in their prefix caches; None: none.
    """

    received_at: float
    timeout_s: float | None = None
    session_id: str = ""
    priority: int = 0
    beams: BeamSearchParams | None = None
    principal: Principal = ANYBODY
    cache_word: str = field(default="", repr=False)
    model: str = ""
    adapter: str = ""
    text_options: DetokenizeOptions = DEFAULT_TEXT
    trace: TraceContext | None = None
    pins: PinTerms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request for one output.

    Attributes:
        sampling_params: the sampling parameters, with a seed.
        terms: the client's terms.
        timeout_s: seconds from now to the deadline.
        leaves_room: whether to avoid nodes with queued work, because the call's tenant already uses
            its fair share.
        cache_salt: prompts share cached blocks only if their salts are equal; empty: no salt.
        is_chat: whether the prompt was a conversation.
        images: images of the prompt with their files, in order.
        pooling: what to compute from the prompt's hidden states; None: tokens are sampled.
        hashes: block hashes of the prompt, shared with copies of this call.
        source: makes the output in place of nodes, as a beam search does; None: nodes make it.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    sampling_params: SamplingParams
    terms: Terms
    timeout_s: float
    leaves_room: bool = False
    cache_salt: bytes = field(default=b"", repr=False)
    is_chat: bool = False
    images: tuple[PromptImage, ...] = field(default=(), repr=False)
    pooling: PoolingParams | None = None
    hashes: PromptHashes = field(default=None, repr=False)  # type: ignore[assignment]  # see below
    source: Callable[[], AsyncGenerator[TextDelta, None]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Hashing a long prompt takes 50 ms, so copies of a call (`dataclasses.replace`) for further
        # outputs of the prompt keep its hashes.
        token_ids, salt, adapter = self.prompt_token_ids, self.cache_salt, self.terms.adapter
        if self.hashes is None or not self.hashes.are_of(token_ids, salt, adapter):
            hashes = PromptHashes(token_ids, salt, adapter, self.image_spans)
            object.__setattr__(self, "hashes", hashes)

    @property
    def image_spans(self) -> tuple[ImageSpan, ...]:
        """The place of each image in the prompt, as a span of token positions."""
        return tuple(image.span for image in self.images)

    @property
    def scoped_id(self) -> str:
        """Request id that is unique among all tenants."""
        return scoped_id(self.request_id, self.terms.principal.tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTerms:
    """The terms that differ between the attempts of one call.

    Attributes:
        epoch: number of the attempt, which nodes repeat in their deltas.
        timeout_s: seconds until the call's deadline.
        supply: what other nodes send for the prompt.
        num_cached_tokens: number of prompt tokens that the node that computes the prompt probably
            has in its cache.
        trace: the attempt's span, which is the parent of the nodes' spans; None: the call is not
            traced.
        adapter_source: where nodes find the files of the call's adapter.
    """

    epoch: int
    timeout_s: float
    supply: PromptSupply
    num_cached_tokens: int = 0
    trace: TraceContext | None = None
    adapter_source: AdapterSource = NO_SOURCE
