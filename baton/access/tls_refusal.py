"""Find out why a TLS connection to a server fails.

gRPC reports a refused handshake only as a closed socket. So after a failure, the functions of this
file repeat the handshake with the standard library, which reports the reason.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from baton.access.exposure import split_address
from baton.access.tls import SYSTEM_CAS, TlsMaterial, TlsOptions, client_context, read_material
from baton.api.errors import ConfigError

_CONNECT_TIMEOUT_S = 2.0
# seconds to wait for data; a gRPC server that accepts a connection sends data at once
_ANSWER_TIMEOUT_S = 0.5
_WANTS_CERTIFICATE = "it wants a client certificate (--tls-cert, --tls-key)"
# TLS alert of a server -> reason. Servers of gRPC and asyncio close the connection without an
# alert.
_ALERTS = {
    "CERTIFICATE_REQUIRED": _WANTS_CERTIFICATE,
    "UNKNOWN_CA": "it does not know the CA of our certificate {cert}",
    "CERTIFICATE_EXPIRED": "our certificate {cert} has expired, it says",
    "BAD_CERTIFICATE": "it refuses our certificate {cert}",
    "CERTIFICATE_UNKNOWN": "it refuses our certificate {cert}",
    "UNSUPPORTED_CERTIFICATE": "our certificate {cert} is for another purpose, it says",
    "WRONG_VERSION_NUMBER": "it speaks no TLS",
}


def why_refused(address: str, options: TlsOptions, server_name: str = "") -> str:
    """Connect, and return why TLS fails; empty if TLS works or no server answers. Blocks.

    Args:
        address: address of the server, ``host:port``.
        options: the client's TLS options.
        server_name: name that the certificate must have; empty: the address's host.
    """
    host, port = split_address("router", address)
    host = host.strip("[]")
    try:
        material = read_material(options)
        with socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as connection:
            if not options:
                return _why_plain_fails(connection)
            return _why_tls_fails(connection, server_name.strip("[]") or host, options, material)
    except ConfigError as error:
        return str(error)
    except OSError:
        return ""


def _why_tls_fails(
    connection: socket.socket, name: str, options: TlsOptions, material: TlsMaterial
) -> str:
    context = client_context(material)
    context.set_alpn_protocols(["h2"])
    talk = _Talk(connection, context, name)
    try:
        talk.shake_hands()
        connection.settimeout(_ANSWER_TIMEOUT_S)
        # In TLS 1.3, a server checks the client's certificate only after the handshake.
        return "" if talk.goes_on() else _of_hanging_up(options)
    except TimeoutError:
        return ""
    except ssl.SSLCertVerificationError as error:
        return _of_verification(error, name, options)
    except (ssl.SSLEOFError, ConnectionError):
        # If the server sent nothing, it is stopping or gone, and TLS is not the reason.
        return _of_hanging_up(options) if talk.heard else ""
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        texts = (text for alert, text in _ALERTS.items() if alert in reason)
        return next(texts, f"TLS fails ({reason})").format(cert=options.cert)


class _Talk:
    """TLS over a socket that the caller owns.

    `ssl.wrap_socket` is not used, because it would take over the socket, and would leave it open if
    the peer has reset the connection.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, name: str | None = None
    ) -> None:
        self.heard = False  # whether the server sent anything
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    def shake_hands(self) -> None:
        self._drive(self._tls.do_handshake)

    def goes_on(self) -> bool:
        """Return whether the server sends data after the handshake instead of hanging up."""
        return bool(self._drive(lambda: self._tls.read(1)))

    def _drive(self, step: Callable[[], object]) -> object:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
            if received := self._connection.recv(1 << 16):
                self.heard = True
                self._incoming.write(received)
            else:
                self._incoming.write_eof()


def _of_hanging_up(options: TlsOptions) -> str:
    """Explain why a server closes the connection during the handshake."""
    if not options.cert:
        return _WANTS_CERTIFICATE
    return f"it hangs up on our certificate {options.cert}; does it trust the CA of that?"


def _of_verification(error: ssl.SSLCertVerificationError, name: str, options: TlsOptions) -> str:
    match error.verify_code:  # OpenSSL's X509_V_ERR_*
        case 9:
            return "its certificate is not valid yet"
        case 10:
            return "its certificate has expired"
        # OpenSSL's codes for another host name and for another IP address in the certificate.
        case 62 | 64:
            return f"its certificate is not for {name}"
    where = "this machine's CAs" if options.ca in ("", SYSTEM_CAS) else options.ca
    return f"its certificate is of no CA in {where} ({error.verify_message})"


def _why_plain_fails(connection: socket.socket) -> str:
    """Return an explanation if the server speaks TLS but the client does not; else empty."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # unverified TLS is safe here: no secrets are sent
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        _Talk(connection, context).shake_hands()
        return "it speaks TLS, and --tls-ca (or BATON_TLS_CA) is not given"
    except OSError:
        return ""
