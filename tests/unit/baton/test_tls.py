"""Unit tests of TLS options and files: one-line errors, and changed files are read again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from baton.access.dev_certificates import DevCA, Holder
from baton.access.tls import TlsFiles, TlsOptions, read_material, read_tls
from baton.api.errors import ConfigError
from tests.fakes.network.certificates import FAR_AHEAD, LONG_AGO, Authority, replace
from tests.fakes.time.virtual_clock import VirtualClock


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def problem_of(options: TlsOptions) -> str:
    with pytest.raises(ConfigError) as caught:
        read_material(options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cert": "c"}, "tls_key: must be given, too, when tls_cert is"),
        ({"key": "k"}, "tls_cert: must be given, too, when tls_key is"),
        ({"require_client_certs": True}, "tls_require_client_certs: needs tls_ca"),
        ({"ca": "system", "require_client_certs": True}, "tls_require_client_certs: needs tls_ca"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        TlsOptions(**options)  # type: ignore[arg-type]


def test_a_server_must_show_a_certificate_and_may_not_trust_the_whole_world() -> None:
    with pytest.raises(ConfigError, match=r"^tls_cert: must be given with tls_ca"):
        TlsOptions(ca="ca.crt").check_server()
    with pytest.raises(ConfigError, match=r"^tls_ca: 'system' would let in"):
        TlsOptions(cert="c", key="k", ca="system").check_server()


def test_no_options_are_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_tls(TlsOptions()) is None
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"BATON_TLS_{name}", name.lower())
    assert TlsOptions.from_environment() == TlsOptions(cert="cert", key="key", ca="ca")


def test_each_wrong_file_is_one_line_that_names_it(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue("good")
    other = authority.issue("other")
    junk = tmp_path / "junk"
    junk.write_text("no PEM at all")
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(DevCA().key.private_bytes(*_encrypted_form()))

    def changed(**fields: str) -> TlsOptions:
        return TlsOptions(**{"cert": good.cert, "key": good.key, "ca": good.ca, **fields})  # type: ignore[arg-type]

    missing = str(tmp_path / "nothing")
    assert problem_of(changed(key=missing)) == (
        f"tls_key: cannot read {missing} (No such file or directory)"
    )
    assert problem_of(changed(cert=str(tmp_path))) == (
        f"tls_cert: cannot read {tmp_path} (Is a directory)"
    )
    assert problem_of(changed(cert=str(junk))) == (
        f"tls_cert: {junk} holds no certificate in PEM form"
    )
    assert problem_of(changed(ca=str(junk))) == f"tls_ca: {junk} holds no certificate in PEM form"
    assert problem_of(changed(key=str(junk))) == f"tls_key: {junk} holds no private key in PEM form"
    assert problem_of(changed(key=str(encrypted))) == (
        f"tls_key: {encrypted} is encrypted; it must not be"
    )
    assert problem_of(changed(key=other.key)) == (
        f"tls_key: {other.key} is not the key of the certificate in {good.cert}"
    )
    expired = authority.issue("expired", now=LONG_AGO)
    assert problem_of(expired).startswith(f"tls_cert: {expired.cert} has expired (")
    early = authority.issue("early", now=FAR_AHEAD)
    assert problem_of(early).startswith(f"tls_cert: {early.cert} is not valid before ")


def _encrypted_form() -> tuple[Any, ...]:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
    )

    return Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")


def test_new_files_are_used_from_the_next_look_on(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = VirtualClock()
    files = TlsFiles(authority.issue("node", "node/decode/d0"), clock=clock)
    first = files.current()
    clock.advance(10)
    assert files.current() is first
    assert not caplog.records
    authority.issue("node", "node/decode/d0")
    assert files.current() is first  # not at every call: files are looked at twice a second
    clock.advance(10)
    second = files.current()
    assert second.chain != first.chain
    [record] = caplog.records
    assert "read new certificates" in record.message
    assert "spiffe://baton/node/decode/d0" in record.message


def test_half_a_rotation_changes_nothing_and_is_told_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    options = authority.issue("node")
    files = TlsFiles(options, clock=clock)
    first = files.current()
    new_chain, new_key = authority.ca.issue(Holder(name="node"))
    replace(Path(options.cert), new_chain)
    for _ in range(5):
        clock.advance(10)
        assert files.current() is first
    [record] = caplog.records
    assert "is not the key of the certificate" in record.message
    assert record.message.endswith("the certificates stay as they were")
    replace(Path(options.key), new_key)
    clock.advance(10)
    assert (files.current().chain, files.current().key) == (new_chain, new_key)


def test_files_that_vanish_or_expire_change_nothing(authority: Authority) -> None:
    clock = VirtualClock()
    options = authority.issue("node")
    files = TlsFiles(options, clock=clock)
    first = files.current()
    authority.issue("node", now=LONG_AGO)
    clock.advance(10)
    assert files.current() is first
    Path(options.key).unlink()
    clock.advance(10)
    assert files.current() is first
