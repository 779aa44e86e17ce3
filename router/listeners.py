"""What each of the router's listeners asks of its callers, and what is refused at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.exposure import Exposure

if TYPE_CHECKING:
    from router.program import RouterConfig

_CERTS = "--tls-require-client-certs"
_KEYS = "--api-keys-file"


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
    # One is enough: who brings none may do nothing then (`baton/access.py`).
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
