"""Call: a checked request, and the terms that its client asks on; plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.access.identity import ANYBODY, Principal
from baton.api.sampling_params import SamplingParams
from baton.link.words import scoped_id
from baton.telemetry.trace_context import TraceContext
from baton.text.stop_strings import DEFAULT_TEXT, DetokenizeOptions
from router.fleet.prefix.prompt_hashes import PromptHashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a client says of a request besides its prompt and how it is sampled.

    Attributes:
        received_at: when its call reached the router, by `time.perf_counter`.
        timeout_s: until the client's deadline, then; None when it has none.
        session_id: requests with the same one share a beginning, and go to the same nodes if the
            policy looks at it; empty: unknown.
        priority: where requests wait, smaller goes first.
        principal: who asks.
        cache_word: prompts with another one share no cache; empty: none is given.
        text_options: how tokens become text.
        trace: what its spans are part of; None: it is not traced.
    """

    received_at: float
    timeout_s: float | None = None
    session_id: str = ""
    priority: int = 0
    principal: Principal = ANYBODY
    cache_word: str = field(default="", repr=False)
    text_options: DetokenizeOptions = DEFAULT_TEXT
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request.

    Attributes:
        sampling_params: with a seed.
        terms: as its client gave them.
        timeout_s: from now.
        leaves_room: no node is to have much of its tenant before it, as others ask for theirs.
        cache_salt: of who shares the prompt's KV; empty: everybody.
        is_chat: its prompt was a conversation.
        hashes: of the prompt; calls that are made of this one have the same ones.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    sampling_params: SamplingParams
    terms: Terms
    timeout_s: float
    leaves_room: bool = False
    cache_salt: bytes = field(default=b"", repr=False)
    is_chat: bool = False
    hashes: PromptHashes = field(default=None, repr=False)  # type: ignore[assignment]  # see below

    def __post_init__(self) -> None:
        # A long prompt's take a twentieth of a second: outputs of one prompt must not each make
        # them. (`dataclasses.replace` hands them on.)
        if self.hashes is None or not self.hashes.are_of(self.prompt_token_ids, self.cache_salt):
            hashes = PromptHashes(self.prompt_token_ids, self.cache_salt)
            object.__setattr__(self, "hashes", hashes)

    @property
    def scoped_id(self) -> str:
        """Its name among the requests of all tenants."""
        return scoped_id(self.request_id, self.terms.principal.tenant)
