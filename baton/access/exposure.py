"""Which addresses other machines can reach, and what a listener there must have.

Loopback needs nothing. Beyond it a listener needs callers that show who they are, and TLS; what
is missing must be waived in so many words.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
from dataclasses import dataclass

from baton.api.errors import ConfigError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?", re.ASCII)
# Before a colon gRPC takes these for the scheme of a URI, and listens somewhere else.
_SCHEMES = ("unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6")
_MAX_PORT = 65535


def split_address(option: str, address: str) -> tuple[str, int]:
    """``host:port`` in its parts; raises ConfigError that names the option.

    The host is a name, an IPv4 address, or an IPv6 address in brackets. Nothing else passes: what
    gRPC would take for a URI (``unix:``, ``ipv4:``) is no host.
    """
    host, separator, port = address.rpartition(":")
    ok = separator and port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT
    is_host = (_NAME.fullmatch(host) and host not in _SCHEMES) or _ipv6(host) is not None
    if not (ok and is_host):
        raise ConfigError(f"{option}: must be host:port, got {address!r}")
    return host, int(port)


def check_is_free(option: str, address: str) -> None:
    """Raise ConfigError that names the option if nobody here can listen on ``host:port``.

    Another program listens there, or it is no address of this machine. Of a name's addresses one
    is enough, as long as the others are free.
    """
    host, port = split_address(option, address)
    problems: list[OSError] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    # What is left of connections that have ended is in nobody's way.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(where)
            except OSError as error:
                problems.append(error)
        in_use = [error for error in problems if error.errno == errno.EADDRINUSE]
        if in_use or len(problems) == len(found):
            raise (in_use or problems)[0]
    except OSError as error:
        raise ConfigError(f"{option}: cannot listen on {address} ({error.strerror})") from error


def _ipv6(host: str) -> ipaddress.IPv6Address | None:
    if not (host.startswith("[") and host.endswith("]")):
        return None
    try:
        return ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return None


def is_public(option: str, address: str) -> bool:
    """Say whether other machines can reach what listens on an address.

    A name is as public as the most public of its addresses, and one without any counts as public.
    Raises ConfigError that names the option.
    """
    host, port = split_address(option, address)
    ipv6 = _ipv6(host)
    if ipv6 is not None:
        return not _is_loopback(ipv6)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return not all(_is_loopback(ipaddress.ip_address(item[4][0])) for item in found)


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The protection of a listener.

    Attributes:
        authentication: the options that would have callers show who they are, for messages.
        is_authenticated: whether they have to.
        is_encrypted: whether it speaks TLS only.
        insecure: whether it may listen beyond loopback without.
    """

    authentication: str
    is_authenticated: bool
    is_encrypted: bool
    insecure: bool

    def check(self, option: str, address: str) -> None:
        """Refuse to listen beyond loopback without protection; no address is none to refuse.

        Where ``insecure`` waives what is missing, that is logged.

        Raises:
            ConfigError: something is missing, or the address is malformed.
        """
        if not address or not is_public(option, address):
            return
        wanted = []
        if not self.is_encrypted:
            wanted.append("TLS (--tls-cert, --tls-key)")
        if not self.is_authenticated:
            wanted.append(f"authentication ({self.authentication})")
        if not wanted:
            return
        missing = " and ".join(wanted)
        if not self.insecure:
            raise ConfigError(
                f"{option}: {address} can be reached from other machines and needs {missing}; "
                "or say --insecure, for example behind a proxy that has both"
            )
        logger.warning(
            "%s: %s can be reached from other machines without %s, as --insecure wants it",
            option,
            address,
            missing,
        )
