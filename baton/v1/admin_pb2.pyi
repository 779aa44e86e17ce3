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
    __slots__ = ("node_name", "connected", "transport", "problem")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    connected: bool
    transport: str
    problem: str
    def __init__(self, node_name: _Optional[str] = ..., connected: bool = ..., transport: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

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
