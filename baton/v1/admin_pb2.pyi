from baton.v1 import node_pb2 as _node_pb2
from baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("node_name", "engine_id", "role", "address", "beat", "peers", "num_requests", "lost")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    engine_id: str
    role: _types_pb2.NodeRole
    address: str
    beat: _node_pb2.NodeBeat
    peers: _containers.RepeatedCompositeFieldContainer[PeerDescription]
    num_requests: int
    lost: bool
    def __init__(self, node_name: _Optional[str] = ..., engine_id: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.NodeRole, str]] = ..., address: _Optional[str] = ..., beat: _Optional[_Union[_node_pb2.NodeBeat, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerDescription, _Mapping]]] = ..., num_requests: _Optional[int] = ..., lost: bool = ...) -> None: ...

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
