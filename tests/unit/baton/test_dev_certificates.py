"""`baton certs dev`: what it writes, and what it refuses."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from baton.access.certificates import identity_of
from baton.access.identity import Role
from baton.access.tls import TlsOptions, read_material
from baton.cli.app import app


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["certs", "dev", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def uris(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def test_all_of_a_system_with_keys_that_only_the_owner_reads(tmp_path: Path) -> None:
    out = tmp_path / "certs"
    said = run("--out", str(out), "--decode", "2", "--host", "my.host", "--host", "10.0.0.7")
    assert "NOT FOR PRODUCTION" in said
    assert f"baton up --model MODEL --tls-folder {out}" in said
    names = {"ca", "router", "p0", "d0", "d1", "client", "operator"}
    assert {path.stem for path in out.iterdir()} == names
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    for path in out.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for name in names - {"ca"}:
        own = out / name
        read_material(TlsOptions(cert=f"{own}.crt", key=f"{own}.key", ca=str(out / "ca.crt")))
    assert uris(out / "d1.crt") == ["spiffe://baton/node/decode/d1"]
    operator = identity_of("", uris(out / "operator.crt"), datetime.now(UTC))
    assert operator.principal.roles == {Role.LOOK, Role.OPERATE}
    router = x509.load_pem_x509_certificate((out / "router.crt").read_bytes())
    hosts = router.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one.value) for one in hosts] == [
        "localhost", "127.0.0.1", "::1", "my.host", "10.0.0.7",
    ]  # fmt: skip


def test_one_more_of_the_same_ca(tmp_path: Path) -> None:
    out = str(tmp_path / "certs")
    run("--out", out)
    before = (tmp_path / "certs" / "ca.crt").read_bytes()
    run("--out", out, "--name", "alice", "--role", "infer", "--tenant", "acme")
    run("--out", out, "--name", "d7", "--role", "decode")
    assert (tmp_path / "certs" / "ca.crt").read_bytes() == before
    alice = tmp_path / "certs" / "alice.crt"
    assert uris(alice) == ["spiffe://baton/tenant/acme/infer/alice"]
    ca = x509.load_pem_x509_certificate(before)
    x509.load_pem_x509_certificate(alice.read_bytes()).verify_directly_issued_by(ca)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--name", "x"], "--role: must be one of"),
        (["--name", "x", "--role", "join"], "--role: must be one of"),
        (["--name", "../x", "--role", "infer"], "--name: must be 1 to 64 letters"),
        (["--name", "ca", "--role", "infer"], "--name: must be 1 to 64 letters"),
        (["--role", "infer"], "--name: must be 1 to 64 letters"),
        (
            ["--name", "x", "--role", "infer", "--tenant", "a/b"],
            "--tenant: must be 1 to 64 letters",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, arguments: list[str], problem: str
) -> None:
    said = run("--out", str(tmp_path), *arguments, code=1)
    assert said.startswith(f"error: {problem}")
    assert said.count("\n") == 1


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run("--out", str(tmp_path))
    key = (tmp_path / "router.key").read_bytes()
    said = run("--out", str(tmp_path), code=1)
    why = "is there already; remove it, or choose another folder"
    assert said == f"error: --out: {tmp_path}/router.key {why}\n"
    assert (tmp_path / "router.key").read_bytes() == key
