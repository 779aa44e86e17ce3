"""The link's messages between router and node, as plain values.

``baton/link/wire.py`` converts them to protobuf and back; no other code sees protobuf.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from baton.api.images import PromptImage
from baton.api.outputs import RequestDelta as RequestDelta
from baton.api.outputs import RequestError as RequestError
from baton.api.pooling import PoolingParams
from baton.api.sampling_params import SamplingParams
from baton.kv.block_hash import ShortHash
from baton.kv.cache_use import NO_CACHE, CacheUse
from baton.kv.pins import PinTerms
from baton.link.beat_interval import BEAT_INTERVAL_S as BEAT_INTERVAL_S
from baton.telemetry.spans import TraceContext

# Version of the link's messages. Raise the version with a change that readers of the previous
# version would misread; a new field is no such change. Each end supports its own version and the
# previous version.
PROTOCOL = 1
FIRST_PROTOCOL = 1  # protocol version of peers that do not send any version
REVISION = "revision"  # entry of ``compatibility`` with the node's revision
# Codes of a `RequestError` besides gRPC's: no node is at fault, so the router retries the request.
PREEMPTED, ADAPTER_MISSING = "PREEMPTED", "ADAPTER_MISSING"
MOVED = frozenset({PREEMPTED, ADAPTER_MISSING})


def protocol_problem(theirs: int, *, own: int = PROTOCOL) -> str:
    """Return why two ends of a link are incompatible; empty if they are compatible."""
    if abs(theirs - own) <= 1:
        return ""
    return (
        f"protocol: the node and the router speak versions {theirs} and {own}, which are more than "
        "one apart; update the older one first"
    )


class NodeRole(Enum):
    """Roles that a node may have."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


# Roles of the two nodes that a request needs. Encode nodes are optional: they relieve prefill
# nodes.
PAIR_ROLES = (NodeRole.PREFILL, NodeRole.DECODE)


# ------------------------------------------------------------------ node -> router


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of one step of prompt tokens on an otherwise idle node.

    Attributes:
        num_context_tokens: earlier tokens of the same prompt, to which the step's tokens attend.
    """

    num_tokens: int
    seconds: float
    num_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Duration of one decode step, with a token of each request, on an otherwise idle node.

    Attributes:
        num_context_tokens: tokens before each request's decoded token, summed over all requests.
    """

    num_requests: int
    num_context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegistration:
    """A node's description of itself; routers pair only nodes with equal ``compatibility``.

    Attributes:
        prefix_hash: algorithm of block hashes (`baton/kv/block_hash.py`); empty: no prefix cache.
        kv_bytes_per_token: bytes of KV per token over all layers; 0: unknown.
        tensor_parallel_size: number of ranks that share each layer.
        pipeline_parallel_size: number of pipeline stages.
        computes_prompts: whether this decode node accepts requests without a prefill node.
        process_key: secret shared only with this node's routers; empty: none.
        step_times: times of steps with prompt tokens, measured at the node's start, sorted by
            tokens; empty: not measured.
        decode_times: times of decode steps, measured at the node's start; empty: not measured, or
            no decode node.
        protocol: version of the link's messages.
        loads_adapters: whether the node can load the adapters of its commands.
        encodes_images: whether the node can compute prompts with images.
        encodings_peer_info: how encode nodes reach this prefill node; empty: this node receives no
            encodings.
        encode_times: times to encode one image, by its number of tokens, sorted; measured at the
            start of an encode node.
        fetch_peer_info, share_peer_info: how other nodes reach this node's end that receives, and
            its end that sends, cached prefixes; empty: no such end.
        batches_peers: whether the node reads `PeerUpdates`, and begins a link with `PeerReports`.
        context_step_times: times of steps with prompt tokens behind earlier tokens, measured at the
            node's start; empty: not measured.
        num_chunk_tokens: maximum number of a prompt's tokens in one step; 0: unknown.
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
    loads_adapters: bool = False
    encodes_images: bool = False
    encodings_peer_info: bytes = b""
    encode_times: tuple[StepTime, ...] = ()
    fetch_peer_info: bytes = b""
    share_peer_info: bytes = b""
    batches_peers: bool = False
    context_step_times: tuple[StepTime, ...] = ()
    num_chunk_tokens: int = 0

    @property
    def revision(self) -> str:
        """Revision of this node in a rollout; empty: none."""
        return self.compatibility.get(REVISION, "")


def failed_delta(request_id: str, epoch: int, error: RequestError) -> RequestDelta:
    """Return the delta that ends a request on a node with an error."""
    return RequestDelta(request_id, 0, (), epoch=epoch, error=error)


class ServingState(Enum):
    """A node's states of service; a draining node finishes its open requests."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


class StepDeltas(msgspec.Struct, frozen=True):
    """The results of one engine step, as a router receives them.

    Most results are rows: a row is one token of one request, without other fields. Nodes emit
    deltas; the wire format packs deltas without other fields into rows.

    Attributes:
        epochs: epoch (attempt of a request) of each row; it identifies the row's request, because a
            router uses each epoch once.
        deltas: all other results; a request's deltas come after its rows.
    """

    epochs: Sequence[int]
    output_indexes: Sequence[int]
    token_ids: Sequence[int]
    deltas: tuple[RequestDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """A node's report of its load.

    Attributes:
        num_transfers: hand-offs of KV that have begun or been granted, and have not ended.
        serving_state: ``DRAINED`` only if every router knows of the drain, and the node has no
            requests, no transfers, and no blocks that a peer may still write.
        num_uncomputed_tokens: prompt tokens that this node has still to compute.
        num_rounds: completed rounds of the node's threads, idle ones included, plus signs of
            progress within rounds.
        stalled_s: how long one of the node's threads has been in one round; 0: none is stalled.
        longest_round_s: duration of the longest completed round.
        stalled_thread: name of the stalled thread.
        adapters: digests of the loaded adapters that accept requests.
        num_waiting_for_adapters: commands that wait until their adapters are loaded;
            ``num_waiting`` includes them.
        adapter_load_s: seconds that reading and loading an adapter recently took; 0: unknown.
        num_waiting_for_encodings: prompts that wait until encode nodes have sent the encodings of
            their images; ``num_waiting`` includes them.
        cache: figures of the prefix cache and of the node's files.
        num_decoding_images: prompts that wait until this node has decoded their image files;
            ``num_waiting`` includes them, ``num_waiting_for_encodings`` does not.
        num_waiting_for_prefixes: prompts that wait for cached KV from files or from other nodes;
            ``num_waiting`` includes them.
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
    adapters: tuple[str, ...] = ()
    num_waiting_for_adapters: int = 0
    adapter_load_s: float = 0.0
    num_waiting_for_encodings: int = 0
    cache: CacheUse = NO_CACHE
    num_decoding_images: int = 0
    num_waiting_for_prefixes: int = 0

    @property
    def num_open(self) -> int:
        """Number of requests and transfers that are open, and of blocks in quarantine."""
        return (
            self.num_waiting
            + self.num_waiting_for_remote_kvs
            + self.num_running
            + self.num_transfers
            + self.num_quarantined_blocks
        )

    @property
    def rests(self) -> bool:
        """Return whether the node has nothing to do, so that its beats may be rare."""
        is_serving = self.serving_state is ServingState.SERVING
        return is_serving and not self.num_open and not self.stalled_thread


# A fleet has two reports for each pair of nodes, so a report must be small and fast to make.
class PeerReport(msgspec.Struct, frozen=True, gc=False):
    """The state of a node's KV connection to a peer.

    Attributes:
        bandwidth_bytes_per_s: bandwidth measured at the self-test, or from KV later; 0: unknown.
        is_encode_node: whether a prefill node reports an encode node, with which it forms no pair.
    """

    engine_id: str
    connected: bool
    transport: str = ""
    problem: str = ""
    bandwidth_bytes_per_s: float = 0.0
    is_encode_node: bool = False


@dataclass(frozen=True, slots=True)
class PeerReports:
    """Reports on several peers in one message; only for routers with ``batches_peers``.

    Attributes:
        unknown: engine ids in `PeerUpdates.known` of peers to which this node is no longer
            connected.
    """

    reports: tuple[PeerReport, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """An open request of a node, with the fields that operators see."""

    request_id: str
    status: str
    transfer_state: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    age_s: float


@dataclass(frozen=True, slots=True)
class KVCacheEvents:
    """Net changes of a node's prefix cache.

    Attributes:
        sequence: number of this message among the messages of an engine id; a gap means lost
            messages.
        snapshot: whether ``stored`` lists the whole cache, so that earlier events are void.
        stored: short hashes of new blocks, in prefix order.
        removed: short hashes of evicted blocks; disjoint from ``stored``.
    """

    sequence: int
    snapshot: bool
    stored: tuple[ShortHash, ...] = field(default=(), repr=False)
    removed: tuple[ShortHash, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class AdminReply:
    """A part of the answer to an `AdminCall`; parts arrive in order.

    Attributes:
        error: error to report instead of an answer; its ``code`` is the name of a gRPC status code.
    """

    call_id: int
    part: bytes = field(default=b"", repr=False)
    last: bool = True
    error: RequestError | None = None


NodeEvent = (
    tuple[RequestDelta, ...]
    | StepDeltas
    | NodeBeat
    | PeerReport
    | PeerReports
    | KVCacheEvents
    | AdminReply
)

# ------------------------------------------------------------------ router -> node


class PeerUpdate(msgspec.Struct, frozen=True, gc=False):
    """News that a possible partner of this node joined (``peer_info``) or left (``removed``).

    Attributes:
        peer_info: empty: the two nodes exchange cached prefixes only.
        fetch_peer_info: how to reach the end at which the node receives cached prefixes from the
            reader of this message; empty: it receives none.
        share_peer_info: how to reach the end from which the node sends cached prefixes to the
            reader; empty: it sends none.
    """

    engine_id: str
    peer_info: bytes = b""
    removed: bool = False
    fetch_peer_info: bytes = b""
    share_peer_info: bytes = b""


@dataclass(frozen=True, slots=True)
class PeerUpdates:
    """Several updates about peers in one message; only for nodes with ``batches_peers``.

    Attributes:
        updates: removals, followed by peers that joined.
        known: engine ids of peers that joined and to which the node has reported a connection.
    """

    updates: tuple[PeerUpdate, ...] = ()
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCommand:
    """The fields of a request that the router sends to the prefill node and to the decode node.

    Attributes:
        output_token_ids: output of earlier attempts. Its KV is computed and sent with the prompt's
            KV, and the prefill node samples the token that follows this output.
        cache_salt: prompts share cached blocks only if their salts are equal; empty: no salt.
        adapter: digest of the request's adapter; empty: the base model.
        adapter_source: folder to load the adapter from if the node lacks it; empty: unknown.
        pins_adapter: whether the adapter stays loaded when other adapters need a slot.
        priority: the client's priority; requests with smaller numbers are scheduled first.
        trace: parent span of the node's spans; None: not traced.
        images: images of the prompt in order; a node that does not compute the prompt gets the
            images without their files.
        pins: prefixes to keep in the prefix cache; None: none.
        fetch_engine_id: the node that sends a cached prefix to this node, which computes the
            prompt; empty: none.
        fetch_num_tokens: number of tokens in this prefix, as far as the router knows.
    """

    request_id: str
    epoch: int
    prompt_token_ids: list[int] = field(repr=False)
    sampling_params: SamplingParams
    timeout_s: float
    output_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = field(default=b"", repr=False)
    adapter: str = ""
    adapter_source: str = ""
    pins_adapter: bool = False
    priority: int = 0
    trace: TraceContext | None = None
    images: tuple[PromptImage, ...] = field(default=(), repr=False)
    pins: PinTerms | None = None
    fetch_engine_id: str = ""
    fetch_num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCommand(RequestCommand):
    """Command to compute a prompt's KV, sample token 1, and hand the request to a decode node.

    Attributes:
        decode_engine_id: node that receives the KV; empty: the request ends here.
        pooling: how to pool the prompt's hidden states instead of sampling token 1; None: sample.
        encode_engine_ids: for each image, the node that sends its encoding; if the entry is empty
            or missing, this node encodes the image.
        encode_wait_s: seconds in which the router expects all encodings.
    """

    decode_engine_id: str
    pooling: PoolingParams | None = None
    encode_engine_ids: tuple[str, ...] = ()
    encode_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCommand(RequestCommand):
    """Command to hold a request until its KV arrives, and then to decode from token 2 on.

    Attributes:
        prefill_engine_id: node that sends the KV; empty: the decode node computes the prompt and
            samples token 1.
    """

    prefill_engine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeCommand:
    """Command to encode images and to send the encodings to a prefill node.

    Attributes:
        images: the images, with their files; their positions in the prompt are not used.
    """

    request_id: str
    epoch: int
    prefill_engine_id: str
    timeout_s: float
    images: tuple[PromptImage, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCommand:
    """Command to send the cached part of a prefix to the node that computes the prompt.

    Attributes:
        reader_engine_id: the node that receives the prefix.
        prompt_token_ids: the prefix: the first tokens of the prompt.
        cache_salt, adapter: as in the command with the prompt.
        images: the images that begin in the prefix, without files; the last image may end after the
            prefix.
    """

    request_id: str
    epoch: int
    reader_engine_id: str
    timeout_s: float
    prompt_token_ids: list[int] = field(repr=False)
    cache_salt: bytes = field(default=b"", repr=False)
    adapter: str = ""
    images: tuple[PromptImage, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class SessionHint:
    """Command to keep a session's last prefix for ``keep_s`` seconds, or, if 0, to end its pins."""

    owner: bytes = field(repr=False)
    session: bytes = field(repr=False)
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Command to end a request on this node, if the node has the request."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The router's refusal of this node.

    Attributes:
        may_retry: whether the node should try to join again, because the problem may be temporary.
    """

    problem: str
    may_retry: bool = False


@dataclass(frozen=True, slots=True)
class RouterBeat:
    """Sign that the router is alive. Handled by the link, not by the node's loop.

    ``intervals_at_rest`` is the number of beat intervals between two beats of a node at rest.
    """

    intervals_at_rest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCommand:
    """Command to drain the node or to serve again. Handled by the link, not by the node's loop.

    Attributes:
        stop: whether to end the process once it is drained.
    """

    resume: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True)
class DrainSeen:
    """Confirmation to a draining node: this router sends no more requests. Handled by the link."""


@dataclass(frozen=True, slots=True)
class SendKVSnapshot:
    """Command to report all blocks in the prefix cache now, and all later changes."""


@dataclass(frozen=True, slots=True)
class AdminCall:
    """An operator's question to the node. Handled by the link, not by the node's loop.

    Attributes:
        call_id: identifies the call on this link.
        request: a serialized `NodeAdminRequest`; only the code that answers parses it.
        operator: name of the operator at the router.
    """

    call_id: int
    request: bytes = field(repr=False)
    timeout_s: float
    operator: str = ""


RouterCommand = (
    Refusal
    | PeerUpdate
    | PeerUpdates
    | PrefillCommand
    | DecodeCommand
    | EncodeCommand
    | ShareCommand
    | SessionHint
    | CancelCommand
    | RouterBeat
    | DrainCommand
    | DrainSeen
    | SendKVSnapshot
    | AdminCall
)


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Command to end every request that a router placed here. A broken link makes this command."""

    reason: str
    router_id: str = ""

    def concerns(self, request_id: str) -> bool:
        """Return whether the command's router placed the request with this id."""
        return split_request_id(request_id)[1] == self.router_id


# ------------------------------------------------------------------ requests of several routers


def scoped_id(request_id: str, tenant: str) -> str:
    """Return an id that is unique among tenants, from a request id and its tenant.

    Clients choose request ids, and a tenant must not reach another's request by guessing its id.
    If there are no tenants, the result is the client's id.
    """
    if not tenant:
        return request_id
    return f"{request_id}@{hashlib.sha256(tenant.encode(errors='surrogatepass')).hexdigest()[:16]}"


def node_request_id(request_id: str, router_id: str) -> str:
    """Return an id that is unique among routers, from a request id and its router's id."""
    return f"{request_id}~{router_id}"


def split_request_id(node_request_id: str) -> tuple[str, str]:
    """Split a node's request id into the router's request id and the router's id."""
    request_id, separator, router_id = node_request_id.rpartition("~")
    return (request_id, router_id) if separator else (router_id, "")
