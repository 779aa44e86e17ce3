"""Make a throw-away CA and certificates, only for trying TLS on one machine."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.api.errors import ConfigError

TRUST_DOMAIN = "baton"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# Certificates are valid from this long before now, for machines whose clocks are slow.
_BACKDATED = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Holder of a development certificate.

    Attributes:
        name: name of the holder and of its files.
        uri_paths: paths of the holder's URIs after the trust domain (`baton.access.certificates`).
        hosts: host names and IP addresses of the holder's server.
    """

    name: str
    uri_paths: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class DevCA:
    """A CA whose certificates are valid for a few days.

    Args:
        days: how long certificates are valid.
    """

    def __init__(self, days: float = 30.0, *, now: datetime | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._begin = (now or datetime.now(UTC)) - _BACKDATED
        self._end = self._begin + _BACKDATED + timedelta(days=days)
        name = _name("Baton development CA, not for production")
        identifier = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        self.certificate = (
            self._builder(name, name, self.key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(identifier, critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def issue(self, holder: Holder) -> tuple[bytes, bytes]:
        """Make a certificate and its private key; return both as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        uris = (f"spiffe://{TRUST_DOMAIN}/{path}" for path in holder.uri_paths)
        names = [*map(_host, holder.hosts), *map(x509.UniformResourceIdentifier, uris)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if holder.hosts:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            self._builder(_name(holder.name), self.certificate.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(authority, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(Encoding.PEM), _key_pem(key)

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
        )


def write_dev_certificates(folder: Path, holders: Sequence[Holder], *, days: float) -> None:
    """Write ``NAME.crt`` and ``NAME.key`` for each holder, signed by the folder's CA or a new one.

    The CA's key stays in the folder, to make more certificates later. No file is overwritten.

    Raises:
        ConfigError: a file exists already, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ca = _load_or_make_ca(folder, days)
        for holder in holders:
            certificate, key = ca.issue(holder)
            _write(folder / f"{holder.name}.key", key, 0o600)
            _write(folder / f"{holder.name}.crt", certificate, 0o644)
    except FileExistsError as error:
        raise ConfigError(
            f"out: {error.filename} is there already; remove it, or choose another folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"out: cannot write {error.filename} ({error.strerror})") from error


def _load_or_make_ca(folder: Path, days: float) -> DevCA:
    ca = DevCA(days)
    certificate, key = folder / "ca.crt", folder / "ca.key"
    if certificate.exists() and key.exists():
        try:
            loaded = load_pem_private_key(key.read_bytes(), None)
            ca.certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"out: {certificate} and {key} are not a CA of Baton's") from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"out: {key} is not a key of Baton's")
        ca.key = loaded
        return ca
    _write(key, _key_pem(ca.key), 0o600)
    _write(certificate, ca.certificate.public_bytes(Encoding.PEM), 0o644)
    return ca


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a new file, with its access mode set before the content is written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
