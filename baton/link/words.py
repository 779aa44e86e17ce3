"""The words that router and node say to each other, as plain values.

``baton/link/wire.py`` turns them into protobuf and back; nothing else needs to know the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from baton.api.outputs import RequestDelta as RequestDelta
from baton.api.outputs import RequestError as RequestError
from baton.api.sampling_params import SamplingParams
from baton.block_hash import ShortHash
from baton.link.beat_interval import BEAT_INTERVAL_S as BEAT_INTERVAL_S
from baton.telemetry.trace_context import TraceContext

# The version of the messages of a link. It grows when one of them changes so that who knows the one
# before would misread it; who speaks one speaks the one before, too. (More fields are no change.)
PROTOCOL = 1
FIRST_PROTOCOL = 1  # of those that do not say so yet
REVISION = "revision"  # among what must be equal for two nodes to be paired


def protocol_problem(theirs: int, *, own: int = PROTOCOL) -> str:
    """Why two ends of a link do not understand each other; empty if they do."""
    if abs(theirs - own) <= 1:
        return ""
    return (
        f"protocol: the node and the router speak versions {theirs} and {own}, which are more than "
        "one apart; update the older one first"
    )


class NodeRole(Enum):
    """The roles of a node."""

    PREFILL = "prefill"
    DECODE = "decode"


# ------------------------------------------------------------------ node -> router


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long one step of prompt tokens took on an otherwise idle node."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """How long one step took on an otherwise idle node that computed one token of each request.

    Attributes:
        num_context_tokens: that came before these tokens, of all requests together.
    """

    num_requests: int
    num_context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegistration:
    """A node's identity; two are paired only if ``compatibility`` is equal in every entry.

    Attributes:
        prefix_hash: algorithm that names blocks (`baton/block_hash.py`); empty: no prefix cache.
        kv_bytes_per_token: of all layers; 0: unknown.
        tensor_parallel_size: ranks that share each layer of its model.
        pipeline_parallel_size: stages that share its layers, each of so many ranks.
        computes_prompts: a decode node that takes requests without a prefill node.
        process_key: known to this process and its routers only; empty: it has none.
        step_times: measured at its start, by rising tokens; the last one is of the largest step
            that was measured. Empty: this node does not tell.
        decode_times: measured at its start. Empty: this node does not tell, or does not decode.
        protocol: version of the link's messages that it speaks.
    """

    node_name: str
    engine_id: str
    role: NodeRole
    version: str
    address: str
    peer_info: bytes
    compatibility: dict[str, str]
    max_model_len: int
    num_blocks: int
    block_size: int
    prefix_hash: str = ""
    kv_bytes_per_token: float = 0.0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    computes_prompts: bool = False
    process_key: bytes = field(default=b"", repr=False)
    protocol: int = PROTOCOL
    step_times: tuple[StepTime, ...] = ()
    decode_times: tuple[DecodeTime, ...] = ()

    @property
    def revision(self) -> str:
        """Which revision of a fleet's nodes this one is of; empty: it was given none."""
        return self.compatibility.get(REVISION, "")


def failed_delta(request_id: str, epoch: int, error: RequestError) -> RequestDelta:
    """Make the delta that ends a request on a node: an error, and no token."""
    return RequestDelta(request_id, 0, (), epoch=epoch, error=error)


class ServingState(Enum):
    """The states of a node in service; one that is to leave ends its open requests first."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


class StepDeltas(msgspec.Struct, frozen=True):
    """The results of one engine step, as a router receives them.

    Most of it are rows of three columns: one more token of a request and nothing else. (A node
    says the same as plain deltas; that most of them travel as rows is the wire's business.)

    Attributes:
        epochs: which attempt a row belongs to, and so which request: a router's never repeat.
        deltas: all that is no row; it comes behind the rows.
    """

    epochs: Sequence[int]
    output_indexes: Sequence[int]
    token_ids: Sequence[int]
    deltas: tuple[RequestDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """The load of a node.

    Attributes:
        num_transfers: hand-offs that were begun or granted and are not at their end.
        serving_state: ``DRAINED`` only when every router knows, and no request, no transfer and no
            block that a peer may still write is left.
        num_uncomputed_tokens: of prompts that are to be computed here.
        num_rounds: that the engine's thread has ended, idle ones too.
        stalled_s: for so long one of the node's threads has been in one round; 0: none has.
        longest_round_s: that ended, up to now.
        stalled_thread: which thread it is.
    """

    num_waiting: int = 0
    num_waiting_for_remote_kvs: int = 0
    num_running: int = 0
    num_free_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_transfers: int = 0
    serving_state: ServingState = ServingState.SERVING
    num_uncomputed_tokens: int = 0
    num_rounds: int = 0
    stalled_s: float = 0.0
    longest_round_s: float = 0.0
    stalled_thread: str = ""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """The state of a node's connection to a peer through its KV connector.

    Attributes:
        bandwidth_bytes_per_s: as measured when they met; 0: unknown.
    """

    engine_id: str
    connected: bool
    transport: str = ""
    problem: str = ""
    bandwidth_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """An open request as operators see it; ``status`` and ``transfer_state`` are names."""

    request_id: str
    status: str
    transfer_state: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    age_s: float


@dataclass(frozen=True, slots=True)
class KVCacheEvents:
    """The net changes of a node's prefix cache, as a router needs them.

    Attributes:
        sequence: 1 more than the last one of the same engine id; a gap means something was lost.
        snapshot: what came before is void; the cache holds ``stored`` and what follows.
        stored: short hashes, heads of prefixes before their tails.
        removed: short hashes; none of them is in ``stored``.
    """

    sequence: int
    snapshot: bool
    stored: tuple[ShortHash, ...] = field(default=(), repr=False)
    removed: tuple[ShortHash, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class AdminReply:
    """A part of the answer to an `AdminCall`; parts come in order.

    Attributes:
        error: in place of an answer; ``code`` is the name of a gRPC status code.
    """

    call_id: int
    part: bytes = field(default=b"", repr=False)
    last: bool = True
    error: RequestError | None = None


NodeEvent = (
    tuple[RequestDelta, ...] | StepDeltas | NodeBeat | PeerReport | KVCacheEvents | AdminReply
)

# ------------------------------------------------------------------ router -> node


@dataclass(frozen=True, slots=True)
class PeerUpdate:
    """A node of the other role came (``peer_info``) or went (``removed``)."""

    engine_id: str
    peer_info: bytes = b""
    removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCommand:
    """Compute a prompt's KV, sample token 1, hand over. Ends here if no decode node is named.

    Attributes:
        output_token_ids: sampled in earlier attempts. Their KV is computed as well, and the token
            behind them is sampled in place of token 1.
        cache_salt: of who shares the prompt's KV; empty: everybody.
        trace: the span that what is done here is part of; None: it is not traced.
    """

    request_id: str
    epoch: int
    prompt_token_ids: list[int] = field(repr=False)
    sampling_params: SamplingParams
    decode_engine_id: str
    timeout_s: float
    output_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = field(default=b"", repr=False)
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCommand:
    """Park a request until its KV arrives, then decode it from token 2 on.

    Attributes:
        prefill_engine_id: whose KV will come; empty: nobody's. Then the prompt is computed here,
            and the first token is sampled here, too.
        output_token_ids: sampled in earlier attempts; their KV arrives with the prompt's.
        cache_salt: of who shares the prompt's KV; empty: everybody.
        trace: the span that what is done here is part of; None: it is not traced.
    """

    request_id: str
    epoch: int
    prompt_token_ids: list[int] = field(repr=False)
    sampling_params: SamplingParams
    prefill_engine_id: str
    timeout_s: float
    output_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = field(default=b"", repr=False)
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """End a request on this node; harmless when it is not there (any more)."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The router does not take this node, and why.

    Attributes:
        may_retry: what is in the way may go.
    """

    problem: str
    may_retry: bool = False


@dataclass(frozen=True, slots=True)
class RouterBeat:
    """The router lives. No node's loop ever sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCommand:
    """Take nothing new, end what is there; or serve again. No node's loop ever sees it.

    Attributes:
        stop: end the process once it is drained.
    """

    resume: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True)
class DrainSeen:
    """This router places nothing more on the draining node. No node's loop ever sees it."""


@dataclass(frozen=True, slots=True)
class SendKVSnapshot:
    """Send a snapshot of the prefix cache, and how it changes from then on."""


@dataclass(frozen=True, slots=True)
class AdminCall:
    """What an operator asks of the node. No node's loop ever sees it.

    Attributes:
        call_id: names it on this link.
        request: a `NodeAdminRequest` as bytes: only who answers needs to understand it.
        operator: who asks, as the router knows them.
    """

    call_id: int
    request: bytes = field(repr=False)
    timeout_s: float
    operator: str = ""


RouterCommand = (
    Refusal
    | PeerUpdate
    | PrefillCommand
    | DecodeCommand
    | CancelCommand
    | RouterBeat
    | DrainCommand
    | DrainSeen
    | SendKVSnapshot
    | AdminCall
)


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Not from a router but because of it: end every request it had placed on the node."""

    reason: str
    router_id: str = ""

    def concerns(self, request_id: str) -> bool:
        """Whether a request, named as nodes name it, is one of that router."""
        return split_request_id(request_id)[1] == self.router_id


# ------------------------------------------------------------------ requests of several routers


def scoped_id(request_id: str, tenant: str) -> str:
    """Join request id and tenant to an id that is unique where several tenants' requests meet.

    Clients choose their request ids; so that a guessed one is of no use, those of each tenant are
    apart. As the client wrote it where there are no tenants.
    """
    if not tenant:
        return request_id
    return f"{request_id}@{hashlib.sha256(tenant.encode(errors='surrogatepass')).hexdigest()[:16]}"


def node_request_id(request_id: str, router_id: str) -> str:
    """Join request id and router id: two routers may serve one request id at once."""
    return f"{request_id}~{router_id}"


def split_request_id(node_request_id: str) -> tuple[str, str]:
    """Split a node's request id into the router's own id and the router."""
    request_id, separator, router_id = node_request_id.rpartition("~")
    return (request_id, router_id) if separator else (router_id, "")
