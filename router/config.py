"""RouterConfig: a router's options, and what is refused of them at the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.access.exposure import Exposure, is_public
from baton.access.tls import NO_TLS, TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.api.errors import ConfigError
from baton.link.words import BEAT_INTERVAL_S
from router.connection_budget import ConnectionOptions
from router.gate.admission_options import AdmissionOptions
from router.intake.text_options import TextOptions

DRAIN_DELAY_S = 5.0  # until load balancers know that a router is not ready; none on one machine
_CERTS = "--tls-require-client-certs"
_KEYS = "--api-keys-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of the router; see `baton router --help`.

    Attributes:
        http_listen: empty for no HTTP.
        served_model_name: what clients call the model; empty: as ``model``.
        strict_fields: fields of HTTP requests that have no effect are errors.
        texts: how conversations become prompts, and outputs messages.
        api_keys_file: who may call; without it, tokens and CAs: anybody.
        audit_log: "-": standard output; empty: none.
        access_log: whether the log has a line for each request.
        connections: what clients' connections may cost.
        max_request_timeout_s: a deadline that a client sets itself is at most this far away.
        drain_delay_s, drain_timeout_s: see `stop_router`; a delay of None is `DRAIN_DELAY_S` where
            others than this machine can call, else 0.
        memory_limit_mib: near it requests are refused; 0: of the control group or the machine.
        cache_salt_secret_file: what tenants' cache salts are made of; empty: a secret of this
            start.
        tls: of all that the router listens on.
        insecure: listen beyond loopback also where TLS or authentication is missing.
    """

    model: str
    listen: str = DEFAULT_ADDRESS
    policy: str = "cost"
    local_prefill: bool = True
    request_timeout_s: float = 600.0
    max_attempts: int = 3
    pair_timeout_s: float = 5.0
    node_timeout_s: float = 1.0
    engine_timeout_s: float = 10.0
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    node_token: str = field(default="", repr=False)
    admin_token: str = field(default="", repr=False)
    node_listen: str = ""
    reuse_port: bool = False
    resume_grace_s: float = 10.0
    http_listen: str = ""
    http_cors_origin: str = ""
    served_model_name: str = ""
    strict_fields: bool = False
    texts: TextOptions = field(default_factory=TextOptions)
    api_keys_file: str = ""
    audit_log: str = ""
    access_log: bool = True
    connections: ConnectionOptions = field(default_factory=ConnectionOptions)
    max_request_timeout_s: float = 3600.0
    drain_delay_s: float | None = None
    drain_timeout_s: float = 20.0
    memory_limit_mib: int = 0
    cache_salt_secret_file: str = ""
    tls: TlsOptions = NO_TLS
    insecure: bool = False

    def __post_init__(self) -> None:
        self.tls.check_server()
        if not self.max_request_timeout_s >= self.request_timeout_s:
            raise ConfigError(
                f"max_request_timeout_s: must be request_timeout_s ({self.request_timeout_s:g}) "
                f"or more, got {self.max_request_timeout_s:g}"
            )
        for name in ("drain_delay_s", "drain_timeout_s"):
            if not (getattr(self, name) or 0) >= 0:
                raise ConfigError(f"{name}: must be 0 or more, got {getattr(self, name):g}")
        if self.reuse_port and not self.node_listen:
            raise ConfigError(
                "reuse_port: needs node_listen, or nodes would join any one of the processes"
            )
        if not self.node_timeout_s >= 2 * BEAT_INTERVAL_S:
            raise ConfigError(
                f"node_timeout_s: must be {2 * BEAT_INTERVAL_S:g} or more (two beats), "
                f"got {self.node_timeout_s:g}"
            )

    def may_self_prefill(self, policy: str) -> bool:
        """Whether decode nodes may be given prompts to compute under this policy."""
        return self.local_prefill and policy == "cost"  # other policies know pairs only


def drain_delay_s(config: RouterConfig) -> float:
    """How long the router serves on, not ready, when it is told to stop."""
    if config.drain_delay_s is not None:
        return config.drain_delay_s
    listens = filter(None, (config.listen, config.http_listen))
    return DRAIN_DELAY_S * any(is_public("listen", listen) for listen in listens)


def requires_client_certs(config: RouterConfig, listen: str) -> bool:
    """Say whether a gRPC listener serves only who shows a certificate.

    Where it does not it asks nobody for one: gRPC knows nothing between. So nodes and operators on
    an address of their own always need one where there is a CA for it; where they share the
    clients' address, who may have keys instead, only if all do.
    """
    is_private = bool(config.node_listen) and listen == config.node_listen
    return config.tls.require_client_certs or (is_private and config.tls.verifies_clients)


def check_exposure(config: RouterConfig) -> None:
    """Refuse listeners that others can reach and that lack protection; raises ConfigError."""
    tls = config.tls
    # One is enough: who brings none may do nothing then (`baton/access/access.py`).
    has_keys = bool(config.api_keys_file or config.node_token or config.admin_token)

    def check(option: str, listen: str, authentication: str, is_authenticated: bool) -> None:
        Exposure(
            authentication=authentication,
            is_authenticated=is_authenticated,
            is_encrypted=bool(tls.cert),
            insecure=config.insecure,
        ).check(option, listen)

    check("listen", config.listen, f"{_KEYS} or {_CERTS}", tls.require_client_certs or has_keys)
    check(
        "node_listen", config.node_listen, f"{_KEYS} or --tls-ca", tls.verifies_clients or has_keys
    )
    check(
        "http_listen",
        config.http_listen,
        f"{_KEYS} or {_CERTS}",
        tls.require_client_certs or has_keys,
    )
