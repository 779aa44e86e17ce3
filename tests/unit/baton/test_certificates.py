"""Unit tests of the identity in a certificate's URIs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from baton.access.certificates import certificate_identity, identity_of
from baton.access.dev_certificates import DevCA, Holder
from baton.access.identity import Principal, Role
from baton.api.errors import UnauthenticatedError

LATER = datetime.now(UTC) + timedelta(days=1)


def principal(*uris: str) -> Principal:
    return identity_of("CN=somebody", uris, LATER).principal


@pytest.mark.parametrize(
    ("uri", "name", "tenant", "roles"),
    [
        ("spiffe://baton/infer/alice", "alice", "alice", {Role.INFER}),
        ("spiffe://my.org/look-operate/eve", "eve", "eve", {Role.LOOK, Role.OPERATE}),
        ("spiffe://baton/tenant/acme/infer/bob", "bob", "acme", {Role.INFER}),
        ("spiffe://baton/tenant/acme/infer-look/b.o_b-2", "b.o_b-2", "acme",
         {Role.INFER, Role.LOOK}),
    ],
)  # fmt: skip
def test_a_caller(uri: str, name: str, tenant: str, roles: set[Role]) -> None:
    assert principal(uri) == Principal(name=name, tenant=tenant, roles=frozenset(roles))


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://baton/join/x",  # nodes say which they are
        "spiffe://baton/admin/x",
        "spiffe://baton/infer/",
        "spiffe://baton/infer",
        "spiffe://baton/infer/x/y",
        "spiffe://baton//infer/x",
        "spiffe://baton/Infer/x",
        "spiffe://baton/infer-/x",
        "spiffe://baton/infer/x\n",
        "spiffe://baton/infer/x?role=operate",
        "spiffe://baton/infer/../operate/x",
        "spiffe://baton/tenant//infer/x",
        "spiffe://baton/tenant/infer/x",
        "spiffe://baton/node/decode/",
        "spiffe://baton/node/router/r",
        "https://baton/infer/x",
        "spiffe:///infer/x",
        "infer/x",
        "",
    ],
)
def test_what_has_another_form_gives_no_role(uri: str) -> None:
    assert principal(uri).roles == frozenset()


def test_several_uris_of_one_caller_add_up_and_of_two_are_refused() -> None:
    both = principal("spiffe://baton/infer/a", "spiffe://baton/look/a", "https://else.where/a")
    assert both.roles == {Role.INFER, Role.LOOK}
    for other in ("spiffe://baton/operate/b", "spiffe://baton/tenant/t/operate/a"):
        with pytest.raises(UnauthenticatedError, match="names more than one caller"):
            principal("spiffe://baton/infer/a", other)


def test_a_node_may_join_as_what_its_certificate_says_and_as_nothing_else() -> None:
    identity = identity_of("CN=d0", ["spiffe://baton/node/decode/d0"], LATER)
    assert identity.principal.roles == {Role.JOIN}
    assert identity.node_refusal("decode", "d0") == ""
    assert identity.node_refusal("prefill", "d0") == (
        "certificate: is for spiffe://baton/node/decode/d0, not for node/prefill/d0"
    )
    assert identity.node_refusal("decode", "d1") != ""
    client = identity_of("CN=alice", ["spiffe://baton/infer/alice"], LATER)
    assert client.node_refusal("decode", "alice") == (
        "certificate: is for spiffe://baton/infer/alice, which is no node"
    )


@pytest.mark.parametrize(
    ("role", "name", "may"),
    [
        ("prefill", "sim-p0", True),
        ("decode", "sim-d17", True),
        ("decode", "sim-p0", False),
        ("decode", "sim-d", False),
        ("decode", "sim-dx", False),
        ("decode", "simXd0", False),
        ("decode", "sim.d0", False),
        ("decode", "d0", False),
    ],
)
def test_one_certificate_is_for_all_simulated_nodes_of_a_process(
    role: str, name: str, may: bool
) -> None:
    identity = identity_of("", ["spiffe://baton/node/sim/sim"], LATER)
    assert (identity.node_refusal(role, name) == "") is may


@pytest.mark.parametrize(
    ("role", "name", "may"),
    [
        ("prefill", "baton-prefill-7d9f-x2x", True),
        ("prefill", "baton-prefill-0", True),
        ("prefill", "baton-prefill", False),
        ("prefill", "baton-prefillX-0", False),
        ("prefill", "other-baton-prefill-0", False),
        ("decode", "baton-prefill-0", False),
    ],
)
def test_one_certificate_is_for_all_nodes_of_a_workload(role: str, name: str, may: bool) -> None:
    identity = identity_of("", ["spiffe://baton/nodes/prefill/baton-prefill"], LATER)
    assert (identity.node_refusal(role, name) == "") is may


@given(st.text(max_size=60))
def test_no_text_is_taken_for_a_role_by_accident(path: str) -> None:
    found = principal(f"spiffe://baton/{path}")
    parts = path.split("/")
    if found.roles:
        assert parts[0] in ("node", "nodes", "tenant") or set(parts[0].split("-")) <= set(Role)


class Context:
    """A servicer context that has only certificates."""

    def __init__(self, pem: bytes) -> None:
        self._pem = pem

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._pem]} if self._pem else {}


class Connection:
    """The transport of an HTTPS request."""

    def __init__(self, der: bytes | None) -> None:
        self._der = der

    def get_extra_info(self, name: str) -> Any:
        assert name == "ssl_object"
        return self

    def getpeercert(self, *, binary_form: bool) -> bytes | None:
        assert binary_form
        return self._der


def test_grpc_and_https_tell_the_same_and_where_there_is_no_certificate_nobody() -> None:
    pem, _ = DevCA().issue(Holder(name="bob", uri_paths=("tenant/acme/infer/bob",)))
    der = x509.load_pem_x509_certificate(pem).public_bytes(_der())
    ours = certificate_identity(Context(pem))
    assert ours is not None
    assert ours == certificate_identity(Connection(der))
    assert ours.principal.tenant == "acme"
    assert certificate_identity(Context(b"")) is None
    assert certificate_identity(Connection(None)) is None


def _der() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.DER


def test_a_certificate_that_expires_while_the_connection_lasts_is_refused() -> None:
    old = DevCA(now=datetime.now(UTC) - timedelta(days=365))
    pem, _ = old.issue(Holder(name="bob", uri_paths=("infer/bob",)))
    with pytest.raises(UnauthenticatedError, match=r"infer/bob: has expired; connect again"):
        certificate_identity(Context(pem))


def test_what_is_no_certificate_is_refused() -> None:
    with pytest.raises(UnauthenticatedError, match="cannot be read"):
        certificate_identity(Context(b"-----BEGIN CERTIFICATE-----\njunk"))
