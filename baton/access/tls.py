"""TlsFiles: reads and checks the files that `TlsOptions` names, for gRPC and HTTPS.

Changed files are read again, so that certificates can be rotated without a restart: servers check
for changes at each handshake, and clients at each connection. Does not know what a certificate
allows.
"""

from __future__ import annotations

import logging
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from baton.access.tls_options import NO_TLS, SYSTEM_CAS, TlsOptions
from baton.api.errors import ConfigError

__all__ = [
    "NO_TLS",
    "SYSTEM_CAS",
    "ServerContext",
    "TlsFiles",
    "TlsMaterial",
    "TlsOptions",
    "channel_credentials",
    "client_context",
    "describe",
    "load_pair",
    "names_of",
    "read_material",
    "read_tls",
    "server_credentials",
]

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.5
_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """Checked contents of a program's TLS files; empty for files that are not given."""

    chain: bytes = b""
    key: bytes = b""
    ca: bytes = b""


class TlsFiles:
    """The TLS files of one program, read again when they change. Thread-safe.

    If changed files are invalid, an error is logged once, and the old contents are kept. So no
    handshake uses a new certificate with an old key while an operator replaces the two files.

    Raises:
        ConfigError: a file cannot be read or is invalid; the text names the file.
    """

    def __init__(self, options: TlsOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = _signature(options)
        self._material = read_material(options)
        self._look_at = clock() + _LOOK_INTERVAL_S

    def current(self) -> TlsMaterial:
        """Return the contents to use now: the same object as before if no file changed."""
        with self._lock:
            if self._clock() < self._look_at:
                return self._material
            self._look_at = self._clock() + _LOOK_INTERVAL_S
            signature = _signature(self.options)
            if signature == self._seen:
                return self._material
            self._seen = signature
            try:
                material = read_material(self.options)
            except ConfigError as error:
                logger.error("%s; the certificates stay as they were", error)
                return self._material
            if material != self._material:
                self._material = material
                logger.info("read new certificates: %s", describe(self.options, material))
            return self._material


def read_tls(options: TlsOptions) -> TlsMaterial | None:
    """Read the files for a channel; None: the options ask for no TLS. Raises ConfigError."""
    return read_material(options) if options else None


def read_material(options: TlsOptions) -> TlsMaterial:
    """Read the files and check that they can be used today; raises ConfigError."""
    chain = key = ca = b""
    if options.cert:
        chain, key = _read("tls_cert", options.cert), _read("tls_key", options.key)
        _check_pair(options, chain, key)
    if options.ca and options.ca != SYSTEM_CAS:
        ca = _read("tls_ca", options.ca)
        _certificates("tls_ca", options.ca, ca)
    return TlsMaterial(chain=chain, key=key, ca=ca)


def describe(options: TlsOptions, material: TlsMaterial) -> str:
    """Return the names and expiry time of the program's certificate, for logs."""
    if not material.chain:
        return f"the CAs of {options.ca}"
    certificate = x509.load_pem_x509_certificates(material.chain)[0]
    until = certificate.not_valid_after_utc
    return f"{options.cert}, for {names_of(certificate)}, until {until:%Y-%m-%d %H:%M} UTC"


def names_of(certificate: x509.Certificate) -> str:
    """Return all names in a certificate, for messages."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return "no name"
    return ", ".join(str(name.value) for name in names) or "no name"


def server_credentials(files: TlsFiles, *, require_client_certs: bool) -> grpc.ServerCredentials:
    """Make the credentials of a gRPC server, which check for changed files at each handshake.

    Python's gRPC can only require a certificate of each client, or ask no client for a certificate.
    """
    last = files.current()

    def configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
        pair = [(material.key, material.chain)]
        return grpc.ssl_server_certificate_configuration(pair, material.ca or None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        material = files.current()
        if material is last:
            return None  # nothing has changed
        last = material
        return configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        configuration(last),
        fetch,  # type: ignore[arg-type]  # the stubs omit that it may return None
        require_client_authentication=require_client_certs,
    )


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Make the credentials of a gRPC channel, which cannot be changed later."""
    return grpc.ssl_channel_credentials(
        material.ca or None, material.key or None, material.chain or None
    )


class ServerContext(ssl.SSLContext):
    """The TLS context of an HTTPS server; new connections use the newest files.

    If files change, a new inner context is made, because an existing context could get another
    certificate but would keep the old CA.
    """

    _files: TlsFiles
    _verify: ssl.VerifyMode
    _protocols: Sequence[str]
    _made: tuple[TlsMaterial, ssl.SSLContext]

    @classmethod
    def of(cls, files: TlsFiles, *, require_client_certs: bool) -> ServerContext:
        """Make the TLS context of an HTTPS server.

        Args:
            require_client_certs: whether clients without a certificate are refused. Clients with an
                invalid certificate are always refused.
        """
        verify = ssl.CERT_REQUIRED if require_client_certs else ssl.CERT_OPTIONAL
        return cls._make(files, verify, ())

    @classmethod
    def for_grpc(cls, files: TlsFiles) -> ServerContext:
        """Make the TLS context of a gRPC server (HTTP/2) that asks clients for no certificates."""
        return cls._make(files, ssl.CERT_NONE, ("h2",))

    @classmethod
    def _make(
        cls, files: TlsFiles, verify: ssl.VerifyMode, protocols: Sequence[str]
    ) -> ServerContext:
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._files, context._verify, context._protocols = files, verify, protocols
        material = files.current()
        context._made = (material, _server_context(material, verify, protocols))
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin TLS on a connection; asyncio and uvloop call this for each connection."""
        material = self._files.current()
        if material is not self._made[0]:
            self._made = (material, _server_context(material, self._verify, self._protocols))
        return self._made[1].wrap_bio(*args, **kwargs)


def _server_context(
    material: TlsMaterial, verify: ssl.VerifyMode, protocols: Sequence[str]
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, material)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if material.ca:
        context.load_verify_locations(cadata=material.ca.decode("ascii"))
        context.verify_mode = verify
    return context


def client_context(material: TlsMaterial) -> ssl.SSLContext:
    """Make the TLS context of a client, which checks the server's certificate chain and name."""
    cadata = material.ca.decode("ascii") if material.ca else None
    context = ssl.create_default_context(cadata=cadata)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, material)
    return context


def load_pair(context: ssl.SSLContext, material: TlsMaterial) -> None:
    """Load the program's certificate and key into a context; do nothing if there are none."""
    if not material.chain:
        return
    # The ssl module only accepts paths. The user's files may have changed since they were checked,
    # so the checked bytes are written to a private file, which is loaded.
    with tempfile.NamedTemporaryFile(prefix="baton-tls-") as file:  # mode 0600
        file.write(material.chain + b"\n" + material.key)
        file.flush()
        context.load_cert_chain(file.name)


# ---------------------------------------------------------------- checks of files


def _signature(options: TlsOptions) -> tuple[tuple[int, int, int] | None, ...]:
    """Return times, inodes and sizes of the TLS files, which change when a file is replaced."""
    found: list[tuple[int, int, int] | None] = []
    for path in (options.cert, options.key, options.ca):
        try:
            status = Path(path).stat() if path and path != SYSTEM_CAS else None
        except (OSError, ValueError):
            status = None
        found.append(status and (status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(found)


def _read(option: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option}: cannot read {path} ({why})") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{option}: {path} has more than {_MAX_FILE_BYTES} bytes")
    return data


def _certificates(option: str, path: str, data: bytes) -> list[x509.Certificate]:
    try:
        data.decode("ascii")  # the ssl module needs ASCII
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{option}: {path} holds no certificate in PEM form") from error


def _check_pair(options: TlsOptions, chain: bytes, key: bytes) -> None:
    certificate = _certificates("tls_cert", options.cert, chain)[0]
    try:
        private_key = load_pem_private_key(key, None)
    except TypeError as error:
        raise ConfigError(f"tls_key: {options.key} is encrypted; it must not be") from error
    except ValueError as error:
        raise ConfigError(f"tls_key: {options.key} holds no private key in PEM form") from error
    if _public(private_key) != _public(certificate):
        raise ConfigError(
            f"tls_key: {options.key} is not the key of the certificate in {options.cert}"
        )
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        at = certificate.not_valid_after_utc
        raise ConfigError(f"tls_cert: {options.cert} has expired ({at:%Y-%m-%d %H:%M} UTC)")
    if certificate.not_valid_before_utc > now:
        at = certificate.not_valid_before_utc
        raise ConfigError(f"tls_cert: {options.cert} is not valid before {at:%Y-%m-%d %H:%M} UTC")


def _public(holder: Any) -> bytes:
    """Return the public key of a certificate or private key, for comparison."""
    key: bytes = holder.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return key
