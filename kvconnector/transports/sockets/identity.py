"""Identity: proves a node's identity on KV connections, and checks peers' proofs.

Without certificate files, a node makes its own key and certificate at its start. Peers get this
certificate in the node's peer info, through the router, and accept no other certificate, so the
operator has nothing to set up. With files, both ends verify the other's certificate chain up to the
CA, and compare the certificate's name with the name in the peer info.
"""

from __future__ import annotations

import logging
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from baton.api.errors import ConfigError, TransferError
from kvconnector.transports.base import CertificateFiles, Certificates

logger = logging.getLogger(__name__)

MAX_CERTIFICATE_BYTES = 4096  # maximum number of bytes of a certificate; Baton's own have about 400
MAX_FORGOTTEN = 64
# Longer than any process lives; peers forget the certificate when the process ends
_VALID_DAYS = 36500


class Identity(Protocol):
    """Proves this process's identity to peers, and checks the identities that peers prove."""

    @property
    def own(self) -> bytes:
        """Return this process's identity, by which peers recognize it; part of the peer info."""

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Return the TLS context for the next connection."""

    def learn(self, identity: bytes) -> None:
        """Accept a peer's identity from now on; raise TransferError for an invalid identity."""

    def forget(self, identity: bytes) -> None:
        """Stop accepting a peer's identity."""

    def shown(self, tls: ssl.SSLObject) -> bytes:
        """Return the identity that the other end of a TLS connection has proved."""


def identity_of(files: CertificateFiles | None) -> Identity:
    """Make the identity from certificate files; without files, from a new key."""
    return PinnedIdentity() if files is None else NamedIdentity(files)


class PinnedIdentity:
    """Proves identity by a certificate that this process makes; peers know the certificate."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        serial_number = x509.random_serial_number()
        # OpenSSL finds certificates by subject, so each certificate needs its own subject.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"baton-kv-{serial_number:x}")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(serial_number)
            .not_valid_before(now - timedelta(days=1))  # clocks differ
            .not_valid_after(now + timedelta(days=_VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.own = certificate.public_bytes(Encoding.DER)
        pem = certificate.public_bytes(Encoding.PEM)
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._pair = pem, key_pem
        self._known: set[bytes] = set()
        self._num_forgotten = 0
        self._contexts = self._make_contexts()

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        return self._contexts[is_server]

    def learn(self, identity: bytes) -> None:
        try:
            if len(identity) > MAX_CERTIFICATE_BYTES:
                raise ValueError
            x509.load_der_x509_certificate(identity)  # more than one certificate is refused
            for context in self._contexts.values():
                context.load_verify_locations(cadata=identity)
        except (ssl.SSLError, ValueError) as error:
            raise TransferError(
                "it has no certificate of its own making, but this node has one (--tls-cert is "
                "needed on all nodes, or on none)"
            ) from error
        self._known.add(identity)

    def forget(self, identity: bytes) -> None:
        # A TLS context cannot forget a certificate. A departed peer's certificate is harmless,
        # because the peer is removed from the table of peers. But the contexts would grow as nodes
        # come and go, so they are made again after many departures.
        self._known.discard(identity)
        self._num_forgotten += 1
        if self._num_forgotten > max(MAX_FORGOTTEN, len(self._known)):
            self._num_forgotten = 0
            try:
                self._contexts = self._make_contexts()
            except OSError as error:  # no file descriptor left, or no place for a temporary file
                logger.warning("TLS contexts of peers that are gone are kept: %s", error)

    def _make_contexts(self) -> dict[bool, ssl.SSLContext]:
        contexts = {side: _context(is_server=side) for side in (False, True)}
        for context in contexts.values():
            _load_pair(context, *self._pair)
            # An attacker may make another certificate with the same subject. So accept only the
            # exact certificate, not any certificate with this subject.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            for identity in self._known:
                context.load_verify_locations(cadata=identity)
        return contexts

    def shown(self, tls: ssl.SSLObject) -> bytes:
        return tls.getpeercert(binary_form=True) or b""


class NamedIdentity:
    """Proves identity by a certificate that a CA has signed; peers check the name in it."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        certificates = files.current()
        if not (certificates.chain and certificates.ca):
            raise ConfigError("kv_connector: tls needs tls_cert, tls_key and tls_ca, or none")
        certificate = x509.load_pem_x509_certificates(certificates.chain)[0]
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            uris = names.value.get_values_for_type(x509.UniformResourceIdentifier)
            found = [*uris, *names.value.get_values_for_type(x509.DNSName)]
        except (x509.ExtensionNotFound, ValueError):
            found = []
        if not found:
            raise ConfigError("tls_cert: must name the node, by a URI or a DNS name")
        self.own = found[0].encode()
        self._certificates = certificates
        # Load the files now: later, the process may have run out of file descriptors.
        self._contexts = _signed_contexts(certificates)

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        current = self._files.current()
        if current is not self._certificates:
            self._certificates = current
            try:
                self._contexts = _signed_contexts(current)
            except OSError as error:
                logger.error("new certificates cannot be used, the old ones stay: %s", error)
        return self._contexts[is_server]

    def learn(self, identity: bytes) -> None:
        if not (identity and identity.isascii()):
            raise TransferError(
                "it has a certificate of its own making, but this node requires one from a CA "
                "(--tls-cert is needed on all nodes, or on none)"
            )

    def forget(self, identity: bytes) -> None:
        pass  # each connection's certificate is compared with the name in the peer info

    def shown(self, tls: ssl.SSLObject) -> bytes:
        certificate = tls.getpeercert() or {}
        names = [name for name in certificate.get("subjectAltName", ()) if len(name) == 2]
        for kind in ("URI", "DNS"):
            for name in names:
                if name[0] == kind:
                    return str(name[1]).encode()
        return b""


def _signed_contexts(certificates: Certificates) -> dict[bool, ssl.SSLContext]:
    """Make one TLS context for a server (True) and one for a client (False); raise OSError."""
    contexts = {side: _context(is_server=side) for side in (False, True)}
    for context in contexts.values():
        _load_pair(context, certificates.chain, certificates.key)
        context.load_verify_locations(cadata=certificates.ca.decode("ascii"))
    return contexts


def _context(*, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A peer's certificate is compared with its peer info, which the router passed on, and not with
    # a host name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        # TLS sessions are not resumed, so that both ends prove their identities on each connection.
        context.num_tickets = 0
    return context


def _load_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    # `ssl` accepts certificates only as file paths.
    with tempfile.NamedTemporaryFile(prefix="baton-kv-") as file:  # mode 0600
        file.write(chain + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)
