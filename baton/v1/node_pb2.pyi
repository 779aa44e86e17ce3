from baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServingState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVING_STATE_UNSPECIFIED: _ClassVar[ServingState]
    SERVING_STATE_DRAINING: _ClassVar[ServingState]
    SERVING_STATE_DRAINED: _ClassVar[ServingState]
SERVING_STATE_UNSPECIFIED: ServingState
SERVING_STATE_DRAINING: ServingState
SERVING_STATE_DRAINED: ServingState

class NodeMessage(_message.Message):
    __slots__ = ("register", "deltas", "beat", "peer_report", "kv_events", "admin_reply", "peer_reports")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    PEER_REPORT_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_REPLY_FIELD_NUMBER: _ClassVar[int]
    PEER_REPORTS_FIELD_NUMBER: _ClassVar[int]
    register: Register
    deltas: StepDeltas
    beat: NodeBeat
    peer_report: PeerReport
    kv_events: KVCacheEvents
    admin_reply: AdminReply
    peer_reports: PeerReports
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., deltas: _Optional[_Union[StepDeltas, _Mapping]] = ..., beat: _Optional[_Union[NodeBeat, _Mapping]] = ..., peer_report: _Optional[_Union[PeerReport, _Mapping]] = ..., kv_events: _Optional[_Union[KVCacheEvents, _Mapping]] = ..., admin_reply: _Optional[_Union[AdminReply, _Mapping]] = ..., peer_reports: _Optional[_Union[PeerReports, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("node_name", "engine_id", "role", "version", "address", "peer_info", "compatibility", "max_model_len", "num_blocks", "block_size", "prefix_hash", "kv_bytes_per_token", "computes_prompts", "process_key", "tensor_parallel_size", "pipeline_parallel_size", "protocol", "step_times", "decode_times", "loads_adapters", "encodes_images", "encodings_peer_info", "encode_times", "fetch_peer_info", "share_peer_info", "batches_peers", "context_step_times", "num_chunk_tokens")
    class CompatibilityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_INFO_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_KEY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIMES_FIELD_NUMBER: _ClassVar[int]
    LOADS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ENCODES_IMAGES_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_PEER_INFO_FIELD_NUMBER: _ClassVar[int]
    ENCODE_TIMES_FIELD_NUMBER: _ClassVar[int]
    FETCH_PEER_INFO_FIELD_NUMBER: _ClassVar[int]
    SHARE_PEER_INFO_FIELD_NUMBER: _ClassVar[int]
    BATCHES_PEERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    engine_id: str
    role: _types_pb2.NodeRole
    version: str
    address: str
    peer_info: bytes
    compatibility: _containers.ScalarMap[str, str]
    max_model_len: int
    num_blocks: int
    block_size: int
    prefix_hash: str
    kv_bytes_per_token: float
    computes_prompts: bool
    process_key: bytes
    tensor_parallel_size: int
    pipeline_parallel_size: int
    protocol: int
    step_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    decode_times: _containers.RepeatedCompositeFieldContainer[DecodeTime]
    loads_adapters: bool
    encodes_images: bool
    encodings_peer_info: bytes
    encode_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    fetch_peer_info: bytes
    share_peer_info: bytes
    batches_peers: bool
    context_step_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    num_chunk_tokens: int
    def __init__(self, node_name: _Optional[str] = ..., engine_id: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.NodeRole, str]] = ..., version: _Optional[str] = ..., address: _Optional[str] = ..., peer_info: _Optional[bytes] = ..., compatibility: _Optional[_Mapping[str, str]] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., prefix_hash: _Optional[str] = ..., kv_bytes_per_token: _Optional[float] = ..., computes_prompts: bool = ..., process_key: _Optional[bytes] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., protocol: _Optional[int] = ..., step_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., decode_times: _Optional[_Iterable[_Union[DecodeTime, _Mapping]]] = ..., loads_adapters: bool = ..., encodes_images: bool = ..., encodings_peer_info: _Optional[bytes] = ..., encode_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., fetch_peer_info: _Optional[bytes] = ..., share_peer_info: _Optional[bytes] = ..., batches_peers: bool = ..., context_step_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., num_chunk_tokens: _Optional[int] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("num_tokens", "seconds", "num_context_tokens")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    seconds: float
    num_context_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., num_context_tokens: _Optional[int] = ...) -> None: ...

class DecodeTime(_message.Message):
    __slots__ = ("num_requests", "num_context_tokens", "seconds")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_context_tokens: int
    seconds: float
    def __init__(self, num_requests: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class StepDeltas(_message.Message):
    __slots__ = ("deltas", "epochs", "output_indexes", "token_ids")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[RequestDelta]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    output_indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, deltas: _Optional[_Iterable[_Union[RequestDelta, _Mapping]]] = ..., epochs: _Optional[_Iterable[int]] = ..., output_indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestDelta(_message.Message):
    __slots__ = ("request_id", "epoch", "output_index", "token_ids", "finish_reason", "prefill", "decode", "error", "logprobs", "prompt_logprobs", "pooled")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    output_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _types_pb2.FinishReason
    prefill: _types_pb2.PrefillReceipt
    decode: _types_pb2.DecodeReceipt
    error: RequestError
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    pooled: bytes
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., output_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., prefill: _Optional[_Union[_types_pb2.PrefillReceipt, _Mapping]] = ..., decode: _Optional[_Union[_types_pb2.DecodeReceipt, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class NodeBeat(_message.Message):
    __slots__ = ("num_waiting", "num_waiting_for_remote_kvs", "num_running", "num_free_blocks", "num_quarantined_blocks", "num_transfers", "serving_state", "num_uncomputed_tokens", "num_rounds", "stalled_s", "longest_round_s", "stalled_thread", "adapters", "num_waiting_for_adapters", "adapter_load_s", "num_waiting_for_encodings", "cache", "num_decoding_images", "num_waiting_for_prefixes")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_REMOTE_KVS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SERVING_STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_ROUND_S_FIELD_NUMBER: _ClassVar[int]
    STALLED_THREAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_IMAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_waiting_for_remote_kvs: int
    num_running: int
    num_free_blocks: int
    num_quarantined_blocks: int
    num_transfers: int
    serving_state: ServingState
    num_uncomputed_tokens: int
    num_rounds: int
    stalled_s: float
    longest_round_s: float
    stalled_thread: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    num_waiting_for_adapters: int
    adapter_load_s: float
    num_waiting_for_encodings: int
    cache: CacheUse
    num_decoding_images: int
    num_waiting_for_prefixes: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_waiting_for_remote_kvs: _Optional[int] = ..., num_running: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., num_transfers: _Optional[int] = ..., serving_state: _Optional[_Union[ServingState, str]] = ..., num_uncomputed_tokens: _Optional[int] = ..., num_rounds: _Optional[int] = ..., stalled_s: _Optional[float] = ..., longest_round_s: _Optional[float] = ..., stalled_thread: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., num_waiting_for_adapters: _Optional[int] = ..., adapter_load_s: _Optional[float] = ..., num_waiting_for_encodings: _Optional[int] = ..., cache: _Optional[_Union[CacheUse, _Mapping]] = ..., num_decoding_images: _Optional[int] = ..., num_waiting_for_prefixes: _Optional[int] = ...) -> None: ...

class CacheUse(_message.Message):
    __slots__ = ("num_blocks", "num_bytes", "num_pinned_blocks", "memory_tokens", "file_tokens", "fetched_tokens", "file_bytes", "num_files", "evicted_after_s", "are_objects", "memory_age_s", "file_age_s", "fetched_age_s")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FILES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    ARE_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    FILE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    FETCHED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    num_pinned_blocks: int
    memory_tokens: int
    file_tokens: int
    fetched_tokens: int
    file_bytes: int
    num_files: int
    evicted_after_s: float
    are_objects: bool
    memory_age_s: float
    file_age_s: float
    fetched_age_s: float
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., file_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., file_bytes: _Optional[int] = ..., num_files: _Optional[int] = ..., evicted_after_s: _Optional[float] = ..., are_objects: bool = ..., memory_age_s: _Optional[float] = ..., file_age_s: _Optional[float] = ..., fetched_age_s: _Optional[float] = ...) -> None: ...

class PeerReport(_message.Message):
    __slots__ = ("engine_id", "connected", "transport", "problem", "bandwidth_bytes_per_s", "is_encode_node")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    IS_ENCODE_NODE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    connected: bool
    transport: str
    problem: str
    bandwidth_bytes_per_s: float
    is_encode_node: bool
    def __init__(self, engine_id: _Optional[str] = ..., connected: bool = ..., transport: _Optional[str] = ..., problem: _Optional[str] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., is_encode_node: bool = ...) -> None: ...

class PeerReports(_message.Message):
    __slots__ = ("groups", "unknown")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[PeerReportGroup]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[_Union[PeerReportGroup, _Mapping]]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerReportGroup(_message.Message):
    __slots__ = ("connected", "transport", "problem", "is_encode_node", "engine_ids", "bandwidths_bytes_per_s")
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IS_ENCODE_NODE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTHS_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    connected: bool
    transport: str
    problem: str
    is_encode_node: bool
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    bandwidths_bytes_per_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, connected: bool = ..., transport: _Optional[str] = ..., problem: _Optional[str] = ..., is_encode_node: bool = ..., engine_ids: _Optional[_Iterable[str]] = ..., bandwidths_bytes_per_s: _Optional[_Iterable[float]] = ...) -> None: ...

class KVCacheEvents(_message.Message):
    __slots__ = ("sequence", "snapshot", "stored", "removed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., snapshot: bool = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class AdminReply(_message.Message):
    __slots__ = ("call_id", "part", "last", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    part: bytes
    last: bool
    error: RequestError
    def __init__(self, call_id: _Optional[int] = ..., part: _Optional[bytes] = ..., last: bool = ..., error: _Optional[_Union[RequestError, _Mapping]] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("registered", "peer_update", "prefill", "decode", "cancel", "beat", "drain", "drain_seen", "send_kv_snapshot", "admin_call", "encode", "share", "session_hint", "peer_updates")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    PEER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SEEN_FIELD_NUMBER: _ClassVar[int]
    SEND_KV_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADMIN_CALL_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SESSION_HINT_FIELD_NUMBER: _ClassVar[int]
    PEER_UPDATES_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    peer_update: PeerUpdate
    prefill: PrefillCommand
    decode: DecodeCommand
    cancel: CancelCommand
    beat: RouterBeat
    drain: DrainCommand
    drain_seen: DrainSeen
    send_kv_snapshot: SendKVSnapshot
    admin_call: AdminCall
    encode: EncodeCommand
    share: ShareCommand
    session_hint: SessionHint
    peer_updates: PeerUpdates
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., peer_update: _Optional[_Union[PeerUpdate, _Mapping]] = ..., prefill: _Optional[_Union[PrefillCommand, _Mapping]] = ..., decode: _Optional[_Union[DecodeCommand, _Mapping]] = ..., cancel: _Optional[_Union[CancelCommand, _Mapping]] = ..., beat: _Optional[_Union[RouterBeat, _Mapping]] = ..., drain: _Optional[_Union[DrainCommand, _Mapping]] = ..., drain_seen: _Optional[_Union[DrainSeen, _Mapping]] = ..., send_kv_snapshot: _Optional[_Union[SendKVSnapshot, _Mapping]] = ..., admin_call: _Optional[_Union[AdminCall, _Mapping]] = ..., encode: _Optional[_Union[EncodeCommand, _Mapping]] = ..., share: _Optional[_Union[ShareCommand, _Mapping]] = ..., session_hint: _Optional[_Union[SessionHint, _Mapping]] = ..., peer_updates: _Optional[_Union[PeerUpdates, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("problem", "router_id", "may_retry", "protocol", "batches_peers", "intervals_at_rest")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    MAY_RETRY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BATCHES_PEERS_FIELD_NUMBER: _ClassVar[int]
    INTERVALS_AT_REST_FIELD_NUMBER: _ClassVar[int]
    problem: str
    router_id: str
    may_retry: bool
    protocol: int
    batches_peers: bool
    intervals_at_rest: int
    def __init__(self, problem: _Optional[str] = ..., router_id: _Optional[str] = ..., may_retry: bool = ..., protocol: _Optional[int] = ..., batches_peers: bool = ..., intervals_at_rest: _Optional[int] = ...) -> None: ...

class PeerUpdate(_message.Message):
    __slots__ = ("engine_id", "peer_info", "removed", "fetch_peer_info", "share_peer_info")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_INFO_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    FETCH_PEER_INFO_FIELD_NUMBER: _ClassVar[int]
    SHARE_PEER_INFO_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    peer_info: bytes
    removed: bool
    fetch_peer_info: bytes
    share_peer_info: bytes
    def __init__(self, engine_id: _Optional[str] = ..., peer_info: _Optional[bytes] = ..., removed: bool = ..., fetch_peer_info: _Optional[bytes] = ..., share_peer_info: _Optional[bytes] = ...) -> None: ...

class PeerUpdates(_message.Message):
    __slots__ = ("removed", "engine_ids", "peer_infos", "fetch_peer_infos", "share_peer_infos", "known")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    PEER_INFOS_FIELD_NUMBER: _ClassVar[int]
    FETCH_PEER_INFOS_FIELD_NUMBER: _ClassVar[int]
    SHARE_PEER_INFOS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedScalarFieldContainer[str]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    peer_infos: _containers.RepeatedScalarFieldContainer[bytes]
    fetch_peer_infos: _containers.RepeatedScalarFieldContainer[bytes]
    share_peer_infos: _containers.RepeatedScalarFieldContainer[bytes]
    known: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, removed: _Optional[_Iterable[str]] = ..., engine_ids: _Optional[_Iterable[str]] = ..., peer_infos: _Optional[_Iterable[bytes]] = ..., fetch_peer_infos: _Optional[_Iterable[bytes]] = ..., share_peer_infos: _Optional[_Iterable[bytes]] = ..., known: _Optional[_Iterable[str]] = ...) -> None: ...

class PromptImage(_message.Message):
    __slots__ = ("first", "num_tokens", "digest", "frames", "rows", "columns", "data")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    first: int
    num_tokens: int
    digest: bytes
    frames: int
    rows: int
    columns: int
    data: bytes
    def __init__(self, first: _Optional[int] = ..., num_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., frames: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("request_id", "epoch", "prompt_token_ids", "sampling_params", "decode_engine_id", "timeout_s", "output_token_ids", "cache_salt", "traceparent", "tracestate", "adapter", "adapter_source", "pins_adapter", "priority", "images", "encode_engine_ids", "encode_wait_s", "fetch_engine_id", "fetch_num_tokens", "pooling", "pins")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PINS_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    FETCH_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _types_pb2.SamplingParams
    decode_engine_id: str
    timeout_s: float
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    traceparent: str
    tracestate: str
    adapter: str
    adapter_source: str
    pins_adapter: bool
    priority: int
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    encode_engine_ids: _containers.RepeatedScalarFieldContainer[str]
    encode_wait_s: float
    fetch_engine_id: str
    fetch_num_tokens: int
    pooling: Pooling
    pins: PinTerms
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., decode_engine_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_source: _Optional[str] = ..., pins_adapter: bool = ..., priority: _Optional[int] = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ..., encode_engine_ids: _Optional[_Iterable[str]] = ..., encode_wait_s: _Optional[float] = ..., fetch_engine_id: _Optional[str] = ..., fetch_num_tokens: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., pins: _Optional[_Union[PinTerms, _Mapping]] = ...) -> None: ...

class PinTerms(_message.Message):
    __slots__ = ("owner", "session", "prefixes")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    session: bytes
    prefixes: _containers.RepeatedCompositeFieldContainer[_types_pb2.PrefixPin]
    def __init__(self, owner: _Optional[bytes] = ..., session: _Optional[bytes] = ..., prefixes: _Optional[_Iterable[_Union[_types_pb2.PrefixPin, _Mapping]]] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "token_ids")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Pooling.Kind]
        LAST: _ClassVar[Pooling.Kind]
        MEAN: _ClassVar[Pooling.Kind]
        CLS: _ClassVar[Pooling.Kind]
        LABELS: _ClassVar[Pooling.Kind]
        TOKENS: _ClassVar[Pooling.Kind]
    KIND_UNSPECIFIED: Pooling.Kind
    LAST: Pooling.Kind
    MEAN: Pooling.Kind
    CLS: Pooling.Kind
    LABELS: Pooling.Kind
    TOKENS: Pooling.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    kind: Pooling.Kind
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[Pooling.Kind, str]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("request_id", "epoch", "prompt_token_ids", "sampling_params", "prefill_engine_id", "timeout_s", "output_token_ids", "cache_salt", "traceparent", "tracestate", "adapter", "adapter_source", "pins_adapter", "priority", "images", "pins", "fetch_engine_id", "fetch_num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PINS_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    FETCH_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    FETCH_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _types_pb2.SamplingParams
    prefill_engine_id: str
    timeout_s: float
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    traceparent: str
    tracestate: str
    adapter: str
    adapter_source: str
    pins_adapter: bool
    priority: int
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    pins: PinTerms
    fetch_engine_id: str
    fetch_num_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., prefill_engine_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_source: _Optional[str] = ..., pins_adapter: bool = ..., priority: _Optional[int] = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ..., pins: _Optional[_Union[PinTerms, _Mapping]] = ..., fetch_engine_id: _Optional[str] = ..., fetch_num_tokens: _Optional[int] = ...) -> None: ...

class SessionHint(_message.Message):
    __slots__ = ("owner", "session", "keep_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    session: bytes
    keep_s: float
    def __init__(self, owner: _Optional[bytes] = ..., session: _Optional[bytes] = ..., keep_s: _Optional[float] = ...) -> None: ...

class EncodeCommand(_message.Message):
    __slots__ = ("request_id", "epoch", "prefill_engine_id", "timeout_s", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prefill_engine_id: str
    timeout_s: float
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prefill_engine_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ...) -> None: ...

class ShareCommand(_message.Message):
    __slots__ = ("request_id", "epoch", "reader_engine_id", "timeout_s", "prompt_token_ids", "cache_salt", "adapter", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READER_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reader_engine_id: str
    timeout_s: float
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    adapter: str
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reader_engine_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., adapter: _Optional[str] = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ...) -> None: ...

class RouterBeat(_message.Message):
    __slots__ = ("intervals_at_rest",)
    INTERVALS_AT_REST_FIELD_NUMBER: _ClassVar[int]
    intervals_at_rest: int
    def __init__(self, intervals_at_rest: _Optional[int] = ...) -> None: ...

class SendKVSnapshot(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelCommand(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DrainCommand(_message.Message):
    __slots__ = ("resume", "stop")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    stop: bool
    def __init__(self, resume: bool = ..., stop: bool = ...) -> None: ...

class DrainSeen(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdminCall(_message.Message):
    __slots__ = ("call_id", "request", "timeout_s", "operator")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    request: bytes
    timeout_s: float
    operator: str
    def __init__(self, call_id: _Optional[int] = ..., request: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., operator: _Optional[str] = ...) -> None: ...
