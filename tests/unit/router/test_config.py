"""What the router and nodes refuse to listen on, before they load or open anything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.access.access import Access
from baton.access.tls import TlsOptions
from baton.api.errors import ConfigError
from node_runtime.node_program import run_node_program
from router.config import RouterConfig, check_exposure, requires_client_certs
from router.program import serve
from tests.fakes.network.certificates import Authority

TLS = TlsOptions(cert="c", key="k")
MTLS = TlsOptions(cert="c", key="k", ca="ca")
ALL_MTLS = TlsOptions(cert="c", key="k", ca="ca", require_client_certs=True)
KEYS: dict[str, Any] = {"api_keys_file": "keys"}
TOKENS: dict[str, Any] = {"node_token": "n", "admin_token": "a"}
HERE, ALL = "127.0.0.1:1", "0.0.0.0:1"


def config(**options: Any) -> RouterConfig:
    return RouterConfig(**{"model": "none", "listen": HERE, "http_listen": "", **options})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"listen": ALL}, "listen: 0.0.0.0:1 .* needs TLS .* and authentication"),
        ({"listen": ALL, "tls": TLS}, "listen: .* needs authentication"),
        ({"listen": ALL, **KEYS, **TOKENS}, r"listen: .* needs TLS \(--tls-cert, --tls-key\);"),
        # A CA alone asks nobody for a certificate where clients and nodes share the port.
        ({"listen": ALL, "tls": MTLS}, "listen: .* needs authentication"),
        (
            {"listen": ALL, "tls": TLS, "node_listen": HERE},
            r"listen: .* \(--api-keys-file or --tls-",
        ),
        ({"node_listen": ALL, "tls": TLS}, "node_listen: .* needs authentication"),
        ({"node_listen": ALL, **TOKENS}, "node_listen: .* needs TLS"),
        ({"http_listen": ALL}, "http_listen: .* needs TLS .* and authentication"),
        ({"http_listen": ALL, "tls": MTLS}, "http_listen: .* needs authentication"),
        ({"http_listen": ALL, **KEYS}, "http_listen: .* needs TLS"),
    ],
)
def test_a_router_beyond_loopback_needs_both(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        asyncio.run(serve(config(**options)))
    check_exposure(config(**options, insecure=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"http_listen": HERE, "node_listen": HERE},
        {"listen": ALL, "http_listen": ALL, "tls": ALL_MTLS},
        # With any key at all, who brings none may do nothing.
        {"listen": ALL, "tls": TLS, **KEYS},
        {"node_listen": ALL, "tls": TLS, "node_token": "n"},
        {"listen": ALL, "node_listen": ALL, "http_listen": ALL, "tls": MTLS, **KEYS},
        {"listen": ALL, "node_listen": HERE, "tls": TLS, **KEYS},
        {"node_listen": ALL, "tls": TLS, **TOKENS},
    ],
)
def test_what_has_both_or_stays_here_may_listen(options: dict[str, Any]) -> None:
    check_exposure(config(**options))


def test_nodes_on_an_address_of_their_own_always_show_a_certificate() -> None:
    apart = config(listen=HERE, node_listen=ALL, tls=MTLS)
    assert requires_client_certs(apart, ALL)
    assert not requires_client_certs(apart, HERE)
    assert not requires_client_certs(config(tls=MTLS), HERE)
    assert requires_client_certs(config(tls=ALL_MTLS), HERE)
    assert not requires_client_certs(config(listen=HERE, node_listen=ALL, tls=TLS), ALL)


@pytest.mark.parametrize("option", ["listen", "metrics_listen"])
def test_a_node_beyond_loopback_needs_mutual_tls(option: str, tmp_path: Path) -> None:
    def make_node(*arguments: object) -> Any:
        raise AssertionError("nothing is loaded before")

    def run(**options: Any) -> None:
        defaults: dict[str, Any] = {"listen": "127.0.0.1:0", option: "0.0.0.0:0"}
        program = run_node_program(
            make_node, routers=["127.0.0.1:1"], join_timeout_s=1, **{**defaults, **options}
        )
        asyncio.run(program)

    authority = Authority(tmp_path)
    full = authority.issue("d0", "node/decode/d0")
    with pytest.raises(ConfigError, match=rf"^{option}: 0.0.0.0:0 .* needs TLS .* and auth"):
        run()
    with pytest.raises(ConfigError, match=rf"^{option}: .* needs authentication \(--tls-ca or"):
        run(tls=TlsOptions(cert=full.cert, key=full.key))
    guarded: dict[str, Any] = {"tls": full, "access": Access(by_certificate=True)}
    for options in (guarded, {"insecure": True}):
        with pytest.raises(AssertionError, match="nothing is loaded before"):
            run(**options)
