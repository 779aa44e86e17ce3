from baton.v1 import node_pb2 as _node_pb2
from baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightsAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_ACTION_UNSPECIFIED: _ClassVar[WeightsAction]
    WEIGHTS_ACTION_DESCRIBE: _ClassVar[WeightsAction]
    WEIGHTS_ACTION_LOAD: _ClassVar[WeightsAction]
    WEIGHTS_ACTION_USE: _ClassVar[WeightsAction]
    WEIGHTS_ACTION_DROP: _ClassVar[WeightsAction]
    WEIGHTS_ACTION_SLEEP: _ClassVar[WeightsAction]
    WEIGHTS_ACTION_WAKE: _ClassVar[WeightsAction]

class RolloutAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_ACTION_UNSPECIFIED: _ClassVar[RolloutAction]
    ROLLOUT_ACTION_PAUSE: _ClassVar[RolloutAction]
    ROLLOUT_ACTION_RESUME: _ClassVar[RolloutAction]
    ROLLOUT_ACTION_UNDO: _ClassVar[RolloutAction]
WEIGHTS_ACTION_UNSPECIFIED: WeightsAction
WEIGHTS_ACTION_DESCRIBE: WeightsAction
WEIGHTS_ACTION_LOAD: WeightsAction
WEIGHTS_ACTION_USE: WeightsAction
WEIGHTS_ACTION_DROP: WeightsAction
WEIGHTS_ACTION_SLEEP: WeightsAction
WEIGHTS_ACTION_WAKE: WeightsAction
ROLLOUT_ACTION_UNSPECIFIED: RolloutAction
ROLLOUT_ACTION_PAUSE: RolloutAction
ROLLOUT_ACTION_RESUME: RolloutAction
ROLLOUT_ACTION_UNDO: RolloutAction

class NodeAdminRequest(_message.Message):
    __slots__ = ("list_requests", "list_blocks", "flush_cache", "set_log_level", "profile", "load_adapter", "unload_adapter", "list_adapters", "weights")
    LIST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LIST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    SET_LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LIST_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    list_requests: ListRequestsRequest
    list_blocks: ListBlocksRequest
    flush_cache: FlushCacheRequest
    set_log_level: SetLogLevelRequest
    profile: ProfileRequest
    load_adapter: LoadAdapterRequest
    unload_adapter: UnloadAdapterRequest
    list_adapters: ListAdaptersRequest
    weights: WeightsRequest
    def __init__(self, list_requests: _Optional[_Union[ListRequestsRequest, _Mapping]] = ..., list_blocks: _Optional[_Union[ListBlocksRequest, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCacheRequest, _Mapping]] = ..., set_log_level: _Optional[_Union[SetLogLevelRequest, _Mapping]] = ..., profile: _Optional[_Union[ProfileRequest, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapterRequest, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapterRequest, _Mapping]] = ..., list_adapters: _Optional[_Union[ListAdaptersRequest, _Mapping]] = ..., weights: _Optional[_Union[WeightsRequest, _Mapping]] = ...) -> None: ...

class NodeAdminResponse(_message.Message):
    __slots__ = ("list_requests", "list_blocks", "flush_cache", "set_log_level", "profile", "load_adapter", "unload_adapter", "list_adapters", "weights", "encodings")
    LIST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LIST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    SET_LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LIST_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    list_requests: ListRequestsResponse
    list_blocks: ListBlocksResponse
    flush_cache: FlushCacheResponse
    set_log_level: SetLogLevelResponse
    profile: ProfileResponse
    load_adapter: AdaptersDescription
    unload_adapter: AdaptersDescription
    list_adapters: AdaptersDescription
    weights: WeightsDescription
    encodings: ListBlocksResponse
    def __init__(self, list_requests: _Optional[_Union[ListRequestsResponse, _Mapping]] = ..., list_blocks: _Optional[_Union[ListBlocksResponse, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCacheResponse, _Mapping]] = ..., set_log_level: _Optional[_Union[SetLogLevelResponse, _Mapping]] = ..., profile: _Optional[_Union[ProfileResponse, _Mapping]] = ..., load_adapter: _Optional[_Union[AdaptersDescription, _Mapping]] = ..., unload_adapter: _Optional[_Union[AdaptersDescription, _Mapping]] = ..., list_adapters: _Optional[_Union[AdaptersDescription, _Mapping]] = ..., weights: _Optional[_Union[WeightsDescription, _Mapping]] = ..., encodings: _Optional[_Union[ListBlocksResponse, _Mapping]] = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("action", "source", "when", "level")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WHEN_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    action: WeightsAction
    source: str
    when: str
    level: str
    def __init__(self, action: _Optional[_Union[WeightsAction, str]] = ..., source: _Optional[str] = ..., when: _Optional[str] = ..., level: _Optional[str] = ...) -> None: ...

class WeightsDescription(_message.Message):
    __slots__ = ("digest", "loaded", "state", "problem")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    digest: str
    loaded: str
    state: str
    problem: str
    def __init__(self, digest: _Optional[str] = ..., loaded: _Optional[str] = ..., state: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("digest", "source", "pinned")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    source: str
    pinned: bool
    def __init__(self, digest: _Optional[str] = ..., source: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdaptersDescription(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterDescription]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterDescription, _Mapping]]] = ...) -> None: ...

class AdapterDescription(_message.Message):
    __slots__ = ("digest", "num_bytes", "is_pinned", "is_leaving")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    digest: str
    num_bytes: int
    is_pinned: bool
    is_leaving: bool
    def __init__(self, digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., is_pinned: bool = ..., is_leaving: bool = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes", "model")
    NODES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeDescription]
    model: str
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeDescription, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("node_name", "engine_id", "role", "address", "beat", "peers", "num_requests", "lost", "version", "num_blocks", "block_size", "max_model_len", "health", "health_why", "weight", "prefill_tokens_per_s", "step_s", "tensor_parallel_size", "pipeline_parallel_size", "revision", "model")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    HEALTH_WHY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    engine_id: str
    role: _types_pb2.NodeRole
    address: str
    beat: _node_pb2.NodeBeat
    peers: _containers.RepeatedCompositeFieldContainer[PeerDescription]
    num_requests: int
    lost: bool
    version: str
    num_blocks: int
    block_size: int
    max_model_len: int
    health: str
    health_why: str
    weight: float
    prefill_tokens_per_s: float
    step_s: float
    tensor_parallel_size: int
    pipeline_parallel_size: int
    revision: str
    model: str
    def __init__(self, node_name: _Optional[str] = ..., engine_id: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.NodeRole, str]] = ..., address: _Optional[str] = ..., beat: _Optional[_Union[_node_pb2.NodeBeat, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerDescription, _Mapping]]] = ..., num_requests: _Optional[int] = ..., lost: bool = ..., version: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., health: _Optional[str] = ..., health_why: _Optional[str] = ..., weight: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., revision: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class PeerDescription(_message.Message):
    __slots__ = ("node_name", "connected", "transport", "problem", "bandwidth_bytes_per_s")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    connected: bool
    transport: str
    problem: str
    bandwidth_bytes_per_s: float
    def __init__(self, node_name: _Optional[str] = ..., connected: bool = ..., transport: _Optional[str] = ..., problem: _Optional[str] = ..., bandwidth_bytes_per_s: _Optional[float] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("requests", "num_ended", "num_refused")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[QuarantinedRequest]
    num_ended: int
    num_refused: int
    def __init__(self, requests: _Optional[_Iterable[_Union[QuarantinedRequest, _Mapping]]] = ..., num_ended: _Optional[int] = ..., num_refused: _Optional[int] = ...) -> None: ...

class QuarantinedRequest(_message.Message):
    __slots__ = ("fingerprint", "request_id", "principal", "num_prompt_tokens", "engine_ids", "left_s", "num_refused")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    request_id: str
    principal: str
    num_prompt_tokens: int
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    left_s: float
    num_refused: int
    def __init__(self, fingerprint: _Optional[str] = ..., request_id: _Optional[str] = ..., principal: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., engine_ids: _Optional[_Iterable[str]] = ..., left_s: _Optional[float] = ..., num_refused: _Optional[int] = ...) -> None: ...

class ReleaseQuarantineRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class ReleaseQuarantineResponse(_message.Message):
    __slots__ = ("num_released",)
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    def __init__(self, num_released: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "num_free_blocks", "num_blocks", "num_quarantined_blocks")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestDescription]
    num_free_blocks: int
    num_blocks: int
    num_quarantined_blocks: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestDescription, _Mapping]]] = ..., num_free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ...) -> None: ...

class RequestDescription(_message.Message):
    __slots__ = ("request_id", "status", "transfer_state", "num_tokens", "num_computed_tokens", "num_blocks", "age_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    status: str
    transfer_state: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    age_s: float
    def __init__(self, request_id: _Optional[str] = ..., status: _Optional[str] = ..., transfer_state: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("holdings", "num_blocks", "num_free_blocks", "num_references", "orphans", "overdrawn")
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFERENCES_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    OVERDRAWN_FIELD_NUMBER: _ClassVar[int]
    holdings: _containers.RepeatedCompositeFieldContainer[BlockHolding]
    num_blocks: int
    num_free_blocks: int
    num_references: int
    orphans: _containers.RepeatedCompositeFieldContainer[BlockRange]
    overdrawn: _containers.RepeatedCompositeFieldContainer[BlockRange]
    def __init__(self, holdings: _Optional[_Iterable[_Union[BlockHolding, _Mapping]]] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_references: _Optional[int] = ..., orphans: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ..., overdrawn: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ...) -> None: ...

class BlockHolding(_message.Message):
    __slots__ = ("owner", "request_id", "epoch", "state", "peer", "age_s", "num_blocks", "ranges")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    owner: str
    request_id: str
    epoch: int
    state: str
    peer: str
    age_s: float
    num_blocks: int
    ranges: _containers.RepeatedCompositeFieldContainer[BlockRange]
    def __init__(self, owner: _Optional[str] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., peer: _Optional[str] = ..., age_s: _Optional[float] = ..., num_blocks: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ...) -> None: ...

class BlockRange(_message.Message):
    __slots__ = ("first_block_id", "num_blocks")
    FIRST_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_block_id: int
    num_blocks: int
    def __init__(self, first_block_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class NodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("node", "force")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    node: str
    force: bool
    def __init__(self, node: _Optional[str] = ..., force: bool = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("window_s", "model")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    model: str
    def __init__(self, window_s: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("uptime_s", "num_open", "num_queued", "num_finished", "num_retried", "num_failed", "num_prompt_tokens", "num_output_tokens", "policy", "admission", "window_s", "num_finished_in_window", "ttft_s", "time_per_token_s", "total_s", "nodes", "overload")
    class NumFailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_IN_WINDOW_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    num_open: int
    num_queued: int
    num_finished: int
    num_retried: int
    num_failed: _containers.ScalarMap[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    policy: str
    admission: AdmissionDescription
    window_s: float
    num_finished_in_window: int
    ttft_s: Percentiles
    time_per_token_s: Percentiles
    total_s: Percentiles
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStats]
    overload: OverloadDescription
    def __init__(self, uptime_s: _Optional[float] = ..., num_open: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_retried: _Optional[int] = ..., num_failed: _Optional[_Mapping[str, int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., policy: _Optional[str] = ..., admission: _Optional[_Union[AdmissionDescription, _Mapping]] = ..., window_s: _Optional[float] = ..., num_finished_in_window: _Optional[int] = ..., ttft_s: _Optional[_Union[Percentiles, _Mapping]] = ..., time_per_token_s: _Optional[_Union[Percentiles, _Mapping]] = ..., total_s: _Optional[_Union[Percentiles, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeStats, _Mapping]]] = ..., overload: _Optional[_Union[OverloadDescription, _Mapping]] = ...) -> None: ...

class OverloadDescription(_message.Message):
    __slots__ = ("level", "reason", "signals", "num_refused")
    class SignalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    level: str
    reason: str
    signals: _containers.ScalarMap[str, float]
    num_refused: int
    def __init__(self, level: _Optional[str] = ..., reason: _Optional[str] = ..., signals: _Optional[_Mapping[str, float]] = ..., num_refused: _Optional[int] = ...) -> None: ...

class AdmissionDescription(_message.Message):
    __slots__ = ("num_queued", "num_queued_tokens", "num_begun", "expected_wait_s", "num_refused")
    class NumRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BEGUN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    num_queued: int
    num_queued_tokens: int
    num_begun: int
    expected_wait_s: float
    num_refused: _containers.ScalarMap[str, int]
    def __init__(self, num_queued: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_begun: _Optional[int] = ..., expected_wait_s: _Optional[float] = ..., num_refused: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Percentiles(_message.Message):
    __slots__ = ("p50", "p90", "p99", "max")
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    p50: float
    p90: float
    p99: float
    max: float
    def __init__(self, p50: _Optional[float] = ..., p90: _Optional[float] = ..., p99: _Optional[float] = ..., max: _Optional[float] = ...) -> None: ...

class NodeStats(_message.Message):
    __slots__ = ("node_name", "num_requests", "num_prompt_tokens", "num_output_tokens", "ttft_s", "time_per_token_s", "num_failed_attempts")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: Percentiles
    time_per_token_s: Percentiles
    num_failed_attempts: int
    def __init__(self, node_name: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., ttft_s: _Optional[_Union[Percentiles, _Mapping]] = ..., time_per_token_s: _Optional[_Union[Percentiles, _Mapping]] = ..., num_failed_attempts: _Optional[int] = ...) -> None: ...

class ListRouterRequestsRequest(_message.Message):
    __slots__ = ("limit", "open_only")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OPEN_ONLY_FIELD_NUMBER: _ClassVar[int]
    limit: int
    open_only: bool
    def __init__(self, limit: _Optional[int] = ..., open_only: bool = ...) -> None: ...

class ListRouterRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestTrace]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestTrace, _Mapping]]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class RequestTrace(_message.Message):
    __slots__ = ("request_id", "received_at", "state", "num_prompt_tokens", "max_tokens", "num_output_tokens", "accepted_s", "first_token_s", "ended_s", "finish_reason", "error_code", "error", "attempts", "receipt", "model", "adapter", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    received_at: float
    state: str
    num_prompt_tokens: int
    max_tokens: int
    num_output_tokens: int
    accepted_s: float
    first_token_s: float
    ended_s: float
    finish_reason: str
    error_code: str
    error: str
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptTrace]
    receipt: _types_pb2.Receipt
    model: str
    adapter: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., received_at: _Optional[float] = ..., state: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., accepted_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., finish_reason: _Optional[str] = ..., error_code: _Optional[str] = ..., error: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[AttemptTrace, _Mapping]]] = ..., receipt: _Optional[_Union[_types_pb2.Receipt, _Mapping]] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AttemptTrace(_message.Message):
    __slots__ = ("began_s", "prefill_node", "decode_node", "failed_s", "error_code", "error")
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    FAILED_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    began_s: float
    prefill_node: str
    decode_node: str
    failed_s: float
    error_code: str
    error: str
    def __init__(self, began_s: _Optional[float] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., failed_s: _Optional[float] = ..., error_code: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "num_prompt_tokens", "max_tokens", "tenant", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    num_prompt_tokens: int
    max_tokens: int
    tenant: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions", "policy")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[DecisionDescription]
    policy: str
    def __init__(self, decisions: _Optional[_Iterable[_Union[DecisionDescription, _Mapping]]] = ..., policy: _Optional[str] = ...) -> None: ...

class DecisionDescription(_message.Message):
    __slots__ = ("placed_at", "num_prompt_tokens", "max_tokens", "num_cached_tokens", "prefill_node", "decode_node", "candidates", "forecast", "is_probe", "prefix_sources")
    PLACED_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    IS_PROBE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCES_FIELD_NUMBER: _ClassVar[int]
    placed_at: float
    num_prompt_tokens: int
    max_tokens: int
    num_cached_tokens: int
    prefill_node: str
    decode_node: str
    candidates: _containers.RepeatedCompositeFieldContainer[CandidateDescription]
    forecast: PrefillForecast
    is_probe: bool
    prefix_sources: _containers.RepeatedCompositeFieldContainer[PrefixSourceDescription]
    def __init__(self, placed_at: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[CandidateDescription, _Mapping]]] = ..., forecast: _Optional[_Union[PrefillForecast, _Mapping]] = ..., is_probe: bool = ..., prefix_sources: _Optional[_Iterable[_Union[PrefixSourceDescription, _Mapping]]] = ...) -> None: ...

class PrefixSourceDescription(_message.Message):
    __slots__ = ("node", "num_tokens", "fetch_ms", "compute_ms", "is_chosen")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    node: str
    num_tokens: int
    fetch_ms: float
    compute_ms: float
    is_chosen: bool
    def __init__(self, node: _Optional[str] = ..., num_tokens: _Optional[int] = ..., fetch_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., is_chosen: bool = ...) -> None: ...

class PrefillForecast(_message.Message):
    __slots__ = ("num_tokens", "wait_ms", "compute_ms", "is_measured", "measured_wait_ms", "measured_compute_ms")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    IS_MEASURED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    wait_ms: float
    compute_ms: float
    is_measured: bool
    measured_wait_ms: float
    measured_compute_ms: float
    def __init__(self, num_tokens: _Optional[int] = ..., wait_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., is_measured: bool = ..., measured_wait_ms: _Optional[float] = ..., measured_compute_ms: _Optional[float] = ...) -> None: ...

class CandidateDescription(_message.Message):
    __slots__ = ("prefill_node", "decode_node", "cost", "terms", "num_computed_tokens")
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_node: str
    decode_node: str
    cost: float
    terms: _containers.RepeatedCompositeFieldContainer[CostTerm]
    num_computed_tokens: int
    def __init__(self, prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., cost: _Optional[float] = ..., terms: _Optional[_Iterable[_Union[CostTerm, _Mapping]]] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...

class CostTerm(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class PolicyDescription(_message.Message):
    __slots__ = ("policy", "known")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    policy: str
    known: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy: _Optional[str] = ..., known: _Optional[_Iterable[str]] = ...) -> None: ...

class GetRolloutRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ChangeRolloutRequest(_message.Message):
    __slots__ = ("action", "revision", "model")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    action: RolloutAction
    revision: str
    model: str
    def __init__(self, action: _Optional[_Union[RolloutAction, str]] = ..., revision: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class RolloutDescription(_message.Message):
    __slots__ = ("state", "revisions", "model")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    state: str
    revisions: _containers.RepeatedCompositeFieldContainer[RevisionDescription]
    model: str
    def __init__(self, state: _Optional[str] = ..., revisions: _Optional[_Iterable[_Union[RevisionDescription, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class RevisionDescription(_message.Message):
    __slots__ = ("revision", "state", "share", "num_prefill", "num_decode", "num_placed", "nodes")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    revision: str
    state: str
    share: float
    num_prefill: int
    num_decode: int
    num_placed: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[str] = ..., state: _Optional[str] = ..., share: _Optional[float] = ..., num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., num_placed: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionResponse(_message.Message):
    __slots__ = ("router", "nodes")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    router: str
    nodes: _containers.ScalarMap[str, str]
    def __init__(self, router: _Optional[str] = ..., nodes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListNamesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamesResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedCompositeFieldContainer[NameDescription]
    def __init__(self, names: _Optional[_Iterable[_Union[NameDescription, _Mapping]]] = ...) -> None: ...

class NameDescription(_message.Message):
    __slots__ = ("name", "model", "adapter", "request_defaults", "chat_template", "num_nodes", "problem", "adapter_source", "pins_adapter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PINS_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    adapter: str
    request_defaults: str
    chat_template: str
    num_nodes: int
    problem: str
    adapter_source: str
    pins_adapter: bool
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., request_defaults: _Optional[str] = ..., chat_template: _Optional[str] = ..., num_nodes: _Optional[int] = ..., problem: _Optional[str] = ..., adapter_source: _Optional[str] = ..., pins_adapter: bool = ...) -> None: ...

class SetNameRequest(_message.Message):
    __slots__ = ("name", "target", "adapter", "request_defaults", "chat_template", "adapter_source", "pins_adapter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PINS_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: str
    adapter: str
    request_defaults: str
    chat_template: str
    adapter_source: str
    pins_adapter: bool
    def __init__(self, name: _Optional[str] = ..., target: _Optional[str] = ..., adapter: _Optional[str] = ..., request_defaults: _Optional[str] = ..., chat_template: _Optional[str] = ..., adapter_source: _Optional[str] = ..., pins_adapter: bool = ...) -> None: ...

class RemoveNameRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class AdminListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdminListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "nodes")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[NamedAdapter]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeAdapters]
    def __init__(self, adapters: _Optional[_Iterable[_Union[NamedAdapter, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeAdapters, _Mapping]]] = ...) -> None: ...

class NamedAdapter(_message.Message):
    __slots__ = ("digest", "model", "names", "source", "pinned", "nodes", "num_requests")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    model: str
    names: _containers.RepeatedScalarFieldContainer[str]
    source: str
    pinned: bool
    nodes: _containers.RepeatedScalarFieldContainer[str]
    num_requests: int
    def __init__(self, digest: _Optional[str] = ..., model: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., source: _Optional[str] = ..., pinned: bool = ..., nodes: _Optional[_Iterable[str]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class NodeAdapters(_message.Message):
    __slots__ = ("node_name", "adapters", "problem")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    adapters: AdaptersDescription
    problem: str
    def __init__(self, node_name: _Optional[str] = ..., adapters: _Optional[_Union[AdaptersDescription, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class AdminLoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source", "digest", "model", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    digest: str
    model: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., digest: _Optional[str] = ..., model: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class AdminPinAdapterRequest(_message.Message):
    __slots__ = ("name", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class AdminUnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class AdapterChange(_message.Message):
    __slots__ = ("name", "digest", "previous", "nodes", "num_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    previous: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeAdapters]
    num_requests: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., previous: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeAdapters, _Mapping]]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class AdminWeightsRequest(_message.Message):
    __slots__ = ("node", "request")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    node: str
    request: WeightsRequest
    def __init__(self, node: _Optional[str] = ..., request: _Optional[_Union[WeightsRequest, _Mapping]] = ...) -> None: ...

class NodeWeights(_message.Message):
    __slots__ = ("node_name", "weights")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    weights: WeightsDescription
    def __init__(self, node_name: _Optional[str] = ..., weights: _Optional[_Union[WeightsDescription, _Mapping]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeAudit]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeAudit, _Mapping]]] = ...) -> None: ...

class NodeAudit(_message.Message):
    __slots__ = ("node_name", "ledger", "problem")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    ledger: ListBlocksResponse
    problem: str
    def __init__(self, node_name: _Optional[str] = ..., ledger: _Optional[_Union[ListBlocksResponse, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_prefixes",)
    NUM_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    num_prefixes: int
    def __init__(self, num_prefixes: _Optional[int] = ...) -> None: ...

class AdminFlushCacheRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class AdminDropPinsRequest(_message.Message):
    __slots__ = ("session_id", "prompt_cache_key", "tenant", "model")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt_cache_key: str
    tenant: str
    model: str
    def __init__(self, session_id: _Optional[str] = ..., prompt_cache_key: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class AdminDropPinsResponse(_message.Message):
    __slots__ = ("num_nodes",)
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    num_nodes: int
    def __init__(self, num_nodes: _Optional[int] = ...) -> None: ...

class AdminFlushCacheResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeFlush]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeFlush, _Mapping]]] = ...) -> None: ...

class NodeFlush(_message.Message):
    __slots__ = ("node_name", "num_prefixes", "problem")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    num_prefixes: int
    problem: str
    def __init__(self, node_name: _Optional[str] = ..., num_prefixes: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level", "module")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    level: str
    module: str
    def __init__(self, level: _Optional[str] = ..., module: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: str
    def __init__(self, previous: _Optional[str] = ...) -> None: ...

class AdminSetLogLevelRequest(_message.Message):
    __slots__ = ("node", "level", "module")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    node: str
    level: str
    module: str
    def __init__(self, node: _Optional[str] = ..., level: _Optional[str] = ..., module: _Optional[str] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class AdminProfileRequest(_message.Message):
    __slots__ = ("node", "seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    seconds: float
    def __init__(self, node: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("thread", "num_samples", "seconds", "functions")
    THREAD_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    thread: str
    num_samples: int
    seconds: float
    functions: _containers.RepeatedCompositeFieldContainer[ProfiledFunction]
    def __init__(self, thread: _Optional[str] = ..., num_samples: _Optional[int] = ..., seconds: _Optional[float] = ..., functions: _Optional[_Iterable[_Union[ProfiledFunction, _Mapping]]] = ...) -> None: ...

class ProfiledFunction(_message.Message):
    __slots__ = ("function", "place", "num_own", "num_total")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NUM_OWN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    function: str
    place: str
    num_own: int
    num_total: int
    def __init__(self, function: _Optional[str] = ..., place: _Optional[str] = ..., num_own: _Optional[int] = ..., num_total: _Optional[int] = ...) -> None: ...
