"""Unit tests of `Access`: a call's principal and rights, and the delays of wrong keys."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from baton.access.access import ADMIN_TOKEN, NODE_TOKEN, Access
from baton.access.allowance import Allowance
from baton.access.api_keys import entry_text
from baton.access.audit_log import AuditKind, AuditLog
from baton.access.call_roles import INFER, JOIN, LOOK, OPERATE
from baton.access.identity import ANYBODY, ANYBODY_HERE, Credentials, Principal, Role
from baton.api.errors import OverloadedError, PermissionDeniedError, UnauthenticatedError

ALICE, BOB = "alice's key of many letters", "bob's key of many letters"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "keys.toml"
    found.write_text(
        entry_text(ALICE, "alice", tenant="search", models=["small"])
        + entry_text(BOB, "bob", roles=["look", "operate"])
        + entry_text("gone", "carol", expires="2020-01-01"),
        encoding="utf-8",
    )
    return found


def showing(key: str, address: str = "10.0.0.1") -> Credentials:
    return Credentials(authorization=f"Bearer {key}" if key else "", address=address)


def test_a_key_is_who_its_table_says(path: Path) -> None:
    access = Access(keys_file=path)
    assert access.principal_of(showing(ALICE)).tenant == "search"
    assert access.principal_of(Credentials(authorization=f"bearer  {BOB} ")).name == "bob"


@pytest.mark.parametrize(
    "authorization",
    ["", ALICE, f"Basic {ALICE}", "Bearer", "Bearer ", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}1",
     "Bearer alice", "Bearer s\udce9cret"],
)  # fmt: skip
def test_whoever_brings_none_is_nobody_and_the_error_tells_no_key(
    path: Path, authorization: str
) -> None:
    with pytest.raises(UnauthenticatedError, match=r"^authorization: ") as caught:
        Access(keys_file=path).principal_of(Credentials(authorization=authorization))
    assert "letters" not in str(caught.value)


def test_an_expired_key_is_nobodys(path: Path) -> None:
    with pytest.raises(UnauthenticatedError, match="the key of carol is expired"):
        Access(keys_file=path).principal_of(showing("gone"))


def test_without_any_credential_it_is_anybody() -> None:
    access = Access()
    assert access.is_open
    assert access.principal_of(showing("")) == access.principal_of(showing("x")) == ANYBODY
    assert access.principal_of(showing(""), ANYBODY_HERE) == ANYBODY_HERE
    assert not ANYBODY.may(Role.OPERATE)
    assert ANYBODY_HERE.roles == set(Role)


def test_tokens_are_keys_with_fixed_roles_and_close_everything_else() -> None:
    access = Access(admin_token="a", node_token="n")
    assert access.principal_of(showing("a")) == ADMIN_TOKEN
    assert access.principal_of(showing("n")) == NODE_TOKEN
    with pytest.raises(UnauthenticatedError):
        access.principal_of(showing(""))
    with pytest.raises(PermissionDeniedError, match="--node-token must have the role infer"):
        access.admit(showing("n"), INFER, "Generate")
    with pytest.raises(PermissionDeniedError, match="must have the role join for this"):
        access.admit(showing("a"), JOIN, "Link")


def test_who_shows_a_certificate_is_who_it_names_unless_a_key_says_otherwise(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Principal(name="p0", tenant="p0", roles=frozenset({Role.JOIN}))
    access = Access(keys_file=path)
    assert access.principal_of(Credentials(certificate=node)) == node
    both = Credentials(certificate=node, authorization=f"Bearer {BOB}")
    assert access.principal_of(both).name == "bob"
    with pytest.raises(UnauthenticatedError):
        access.principal_of(Credentials(certificate=node, authorization="Bearer x"))
    certificates_only = Access(by_certificate=True)
    certificates_only.warn_of_gaps(Role)
    assert not caplog.records  # a certificate may well have the role that no key has
    assert not certificates_only.is_open
    # The client of OpenAI always sends a key, if only "none".
    assert certificates_only.principal_of(Credentials(certificate=node, authorization="x")) == node
    with pytest.raises(UnauthenticatedError):
        certificates_only.principal_of(Credentials(authorization="Bearer x"))


def test_roles_and_models_are_asked_for(path: Path) -> None:
    access = Access(keys_file=path, model="small")
    assert access.admit(showing(ALICE), INFER, "Generate").name == "alice"
    assert access.admit(showing(BOB), LOOK, "ListNodes").name == "bob"
    with pytest.raises(PermissionDeniedError, match="alice must have the role operate for this"):
        access.admit(showing(ALICE), OPERATE, "Drain")
    with pytest.raises(PermissionDeniedError, match="nobody may do this"):
        access.admit(showing(BOB), frozenset(), "of tomorrow")
    other = Access(keys_file=path, model="large")
    with pytest.raises(PermissionDeniedError, match="model: alice may not use 'large'"):
        other.admit(showing(ALICE), INFER, "Generate")


def test_a_file_read_again_counts_at_once_and_a_wrong_one_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = Access(keys_file=path)
    path.write_text(entry_text("new", "dora"), encoding="utf-8")
    with caplog.at_level(logging.INFO):
        access.reload()
        assert access.principal_of(showing("new")).name == "dora"
        with pytest.raises(UnauthenticatedError):
            access.principal_of(showing(ALICE))
        path.write_text("nonsense", encoding="utf-8")
        access.reload()
    assert access.principal_of(showing("new")).name == "dora"
    assert "is not TOML" in caplog.text
    assert "the keys stay as they were" in caplog.text


# ---------------------------------------------------------------- wrong keys


def try_wrong_keys(access: Access, address: str, number: int) -> list[str]:
    found = []
    for attempt in range(number):
        with pytest.raises((UnauthenticatedError, OverloadedError)) as caught:
            access.principal_of(showing(f"guess {attempt}", address))
        found.append(type(caught.value).__name__)
    return found


def test_many_wrong_keys_of_one_address_are_refused_unseen_and_no_others(path: Path) -> None:
    access = Access(keys_file=path)
    assert access.principal_of(showing(ALICE)).name == "alice"
    kinds = try_wrong_keys(access, "10.0.0.1", 100)
    assert kinds[0] == "UnauthenticatedError"
    assert kinds[-1] == "OverloadedError"
    assert kinds.count("UnauthenticatedError") <= 12  # 10 at once, and one a second
    # A right key from that address is refused like a wrong one; earlier callers go on.
    with pytest.raises(OverloadedError) as caught:
        access.principal_of(showing(BOB))
    assert caught.value.retry_delay_s is not None
    assert 0 < caught.value.retry_delay_s <= 1.0
    assert access.principal_of(showing(ALICE)).name == "alice"
    assert access.principal_of(showing(BOB, "10.0.0.2")).name == "bob"


def test_an_ipv6_network_is_one_address(path: Path) -> None:
    access = Access(keys_file=path)
    kinds = [
        kind for host in range(100) for kind in try_wrong_keys(access, f"2001:db8::{host:x}", 1)
    ]
    assert kinds.count("UnauthenticatedError") <= 12
    assert access.principal_of(showing(BOB, "2001:db8:0:1::1")).name == "bob"


def test_a_million_addresses_do_not_fill_the_memory() -> None:
    now = 0.0
    allowance = Allowance(2, 1.0, max_names=10, clock=lambda: now)
    for number in range(1000):
        assert allowance.take(str(number))
    assert len(allowance) == 10
    assert allowance.take("999")
    assert not allowance.take("999")
    assert allowance.wait_s("999") == 1.0
    now = 1.0
    assert allowance.take("999")


def test_failures_and_refusals_are_audited_without_the_key_and_not_without_end(
    path: Path, tmp_path: Path
) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), program="router")
    access = Access(keys_file=path, audit=log)
    for _ in range(1000):
        with pytest.raises(UnauthenticatedError):
            access.admit(showing(""), LOOK, "GET /metrics")
    with pytest.raises(UnauthenticatedError):
        access.admit(showing("open sesame", "10.0.0.9"), LOOK, "GET /metrics")
    with pytest.raises(PermissionDeniedError):
        access.admit(showing(ALICE, "10.0.0.8"), OPERATE, "Drain")
    log.close()
    text = (tmp_path / "audit.jsonl").read_text(encoding="utf-8")
    events = [json.loads(line) for line in text.splitlines()]
    assert 20 <= len(events) <= 40
    assert events[0]["event"] == "failed"
    assert events[0]["address"] == "10.0.0.1"
    assert sum(event.get("left_out_before", 0) for event in events) >= 960
    assert (events[-1]["event"], events[-1]["who"]) == ("refused", "alice")
    assert "sesame" not in text


def test_a_client_does_not_flood_the_audit_log_by_what_it_may_do(
    path: Path, tmp_path: Path
) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), program="router")
    access = Access(keys_file=path, audit=log)
    alice, bob = (access.principal_of(showing(key)) for key in (ALICE, BOB))
    for number in range(1000):
        arguments = {"request_id": f"{number}"}
        access.note(AuditKind.CHANGED, alice, "10.0.0.1", "Abort", arguments, "is not open")
        access.note(AuditKind.LOOKED, alice, "10.0.0.1", "Trace", arguments)
    for number in range(100):  # what operators do is told, always
        access.note(AuditKind.CHANGED, bob, "10.0.0.2", "Drain", {"node": f"d{number}"})
    with pytest.raises(UnauthenticatedError):
        access.admit(showing("open sesame", "10.0.0.9"), LOOK, "GET /metrics")
    log.close()
    text = (tmp_path / "audit.jsonl").read_text(encoding="utf-8")
    events = [json.loads(line) for line in text.splitlines()]
    assert 40 <= sum(event["who"] == "alice" for event in events) <= 60
    assert sum(event["who"] == "bob" for event in events) == 100
    assert events[-1]["event"] == "failed"
    assert sum(event.get("left_out_before", 0) for event in events) >= 1900


def test_ipv4_addresses_are_one_each_where_a_listener_takes_ipv6_too(path: Path) -> None:
    access = Access(keys_file=path)
    assert "OverloadedError" in try_wrong_keys(access, "::ffff:10.0.0.7", 50)
    assert access.principal_of(showing(BOB, "::ffff:10.0.0.8")).name == "bob"
    with pytest.raises(OverloadedError):  # the same machine, however it is written
        access.principal_of(showing(ALICE, "10.0.0.7"))
