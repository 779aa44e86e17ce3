"""Which role every gRPC call wants. A call that is not here is refused to everybody.

A test walks all services of `proto/` and everything that a server of ours serves.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.access.identity import Role

Roles = frozenset[Role]

OPEN = None
"""No role, and no credentials: answered before anybody is asked who they are."""

INFER: Roles = frozenset({Role.INFER})
LOOK: Roles = frozenset({Role.LOOK, Role.OPERATE})  # who may change things may look
OPERATE: Roles = frozenset({Role.OPERATE})
JOIN: Roles = frozenset({Role.JOIN})
# Clients may ask this of their own tenant's requests, operators of all.
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
        "ListModels": INFER,
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
        "ListNodeRequests": LOOK,
        "ListQuarantine": LOOK,
        "ReleaseQuarantine": OPERATE,
        "Audit": LOOK,
        "FlushCache": OPERATE,
        "SetLogLevel": OPERATE,
        "Profile": OPERATE,
    },
    # Load balancers and Kubernetes' gRPC probes bring no credentials; it says no more than that
    # something listens, which who could connect knows.
    # (`Watch` holds a stream open: who is unknown could hold a million.)
    "grpc.health.v1.Health": {"Check": OPEN, "List": OPEN, "Watch": ANY},
    # What it tells is in the repository; still, nobody unknown gets to look around.
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": ANY},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": ANY},
}

ROLES_OF_CALL: Mapping[str, Roles | None] = {
    f"/{service}/{method}": roles
    for service, methods in _OF_SERVICE.items()
    for method, roles in methods.items()
}
