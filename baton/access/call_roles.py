"""The roles that allow each gRPC call. A call that is not in this table is refused.

A test compares this table with all services in `proto/` and all calls of Baton's servers.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.access.identity import Role

Roles = frozenset[Role]

OPEN = None
"""For calls that need neither a role nor credentials."""

INFER: Roles = frozenset({Role.INFER})
# Operators who may change things may also read everything.
LOOK: Roles = frozenset({Role.LOOK, Role.OPERATE})
OPERATE: Roles = frozenset({Role.OPERATE})
JOIN: Roles = frozenset({Role.JOIN})
# Clients may see or abort their own tenant's requests, operators all requests.
OWN_OR_LOOK: Roles = INFER | LOOK
OWN_OR_OPERATE: Roles = INFER | OPERATE
ANY: Roles = frozenset(Role)

_OF_SERVICE: Mapping[str, Mapping[str, Roles | None]] = {
    "baton.v1.Inference": {
        "Generate": INFER,
        "GenerateBatch": INFER,
        "Resume": INFER,
        "Tokenize": INFER,
        "CountTokens": INFER,
        "DropPins": INFER,
        "Prefetch": INFER,
        "ListModels": INFER,
        "Embed": INFER,
        "Score": INFER,
        "Rerank": INFER,
        "Classify": INFER,
    },
    "baton.v1.NodeLink": {"Link": JOIN},
    "baton.v1.Admin": {
        "ListNodes": LOOK,
        "GetNode": LOOK,
        "Drain": OPERATE,
        "Resume": OPERATE,
        "Remove": OPERATE,
        "GetStats": LOOK,
        "ListRequests": OWN_OR_LOOK,
        "Trace": OWN_OR_LOOK,
        "Explain": OWN_OR_LOOK,
        "Abort": OWN_OR_OPERATE,
        "GetPolicy": LOOK,
        "SetPolicy": OPERATE,
        "GetRollout": LOOK,
        "ChangeRollout": OPERATE,
        "GetVersion": LOOK,
        "ListNames": LOOK,
        "SetName": OPERATE,
        "RemoveName": OPERATE,
        "ListAdapters": LOOK,
        "LoadAdapter": OPERATE,
        "PinAdapter": OPERATE,
        "UnloadAdapter": OPERATE,
        "ChangeWeights": OPERATE,
        "ListNodeRequests": LOOK,
        "ListQuarantine": LOOK,
        "ReleaseQuarantine": OPERATE,
        "Audit": LOOK,
        "FlushCache": OPERATE,
        "DropPins": OWN_OR_OPERATE,
        "SetLogLevel": OPERATE,
        "Profile": OPERATE,
    },
    # Load balancers and Kubernetes' gRPC probes do not send credentials. The answer only tells that
    # a server listens, which a caller who can connect knows anyway. `Watch` needs credentials: it
    # keeps a stream open, and unknown callers could open a million streams.
    "grpc.health.v1.Health": {"Check": OPEN, "List": OPEN, "Watch": ANY},
    # The service descriptions are public, but unknown callers do not need them.
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": ANY},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": ANY},
}

ROLES_OF_CALL: Mapping[str, Roles | None] = {
    f"/{service}/{method}": roles
    for service, methods in _OF_SERVICE.items()
    for method, roles in methods.items()
}
