"""Convert parameters of pooled requests to protobuf and back."""

from __future__ import annotations

from baton.api.errors import InvalidRequestError
from baton.api.pooling import PoolingKind, PoolingParams
from baton.v1 import node_pb2

_TO_PROTO = {
    PoolingKind.LAST: node_pb2.Pooling.LAST,
    PoolingKind.MEAN: node_pb2.Pooling.MEAN,
    PoolingKind.CLS: node_pb2.Pooling.CLS,
    PoolingKind.LABELS: node_pb2.Pooling.LABELS,
    PoolingKind.TOKENS: node_pb2.Pooling.TOKENS,
}
_FROM_PROTO = {number: kind for kind, number in _TO_PROTO.items()}


def pooling_to_proto(params: PoolingParams | None) -> node_pb2.Pooling | None:
    """Convert the pooling parameters to a message; None: the request samples tokens instead."""
    if params is None:
        return None
    return node_pb2.Pooling(kind=_TO_PROTO[params.kind], token_ids=params.token_ids)


def pooling_from_proto(command: node_pb2.PrefillCommand) -> PoolingParams | None:
    """Return a command's pooling parameters; None: the request samples tokens instead.

    Raises:
        InvalidRequestError: the kind of pooling is unknown.
    """
    if not command.HasField("pooling"):
        return None
    kind = _FROM_PROTO.get(command.pooling.kind)
    if kind is None:
        raise InvalidRequestError("pooling", f"kind {command.pooling.kind} is not known here")
    return PoolingParams(kind, tuple(command.pooling.token_ids))
