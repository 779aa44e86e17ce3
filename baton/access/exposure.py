"""Exposure: check that a listener which other machines can reach is protected.

A loopback listener needs no protection. Any other listener needs TLS and authenticated callers,
unless the user waives both by an option.
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
# Hosts to refuse, because gRPC would read an address such as ``unix:50051`` as a URI.
_SCHEMES = ("unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6")
_MAX_PORT = 65535


def split_address(option: str, address: str) -> tuple[str, int]:
    """Split ``host:port``; raises ConfigError naming the option.

    The host must be a name, an IPv4 address, or an IPv6 address in brackets. URI schemes of gRPC
    (``unix:``, ``ipv4:``) are refused.
    """
    host, separator, port = address.rpartition(":")
    ok = separator and port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT
    is_host = (_NAME.fullmatch(host) and host not in _SCHEMES) or _ipv6(host) is not None
    if not (ok and is_host):
        raise ConfigError(f"{option}: must be host:port, got {address!r}")
    return host, int(port)


def check_is_free(option: str, address: str) -> None:
    """Raise ConfigError naming the option if this machine cannot listen on ``host:port``.

    For example, another program may listen there, or no network interface has the address. If a
    name has several addresses, at least one must be usable and none in use.
    """
    host, port = split_address(option, address)
    problems: list[OSError] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    # Closed connections in the state TIME_WAIT must not make the port look used.
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
    """Return whether other machines can reach a listener on an address.

    A name is public if any of its addresses is public, or if the name has no address. Raises
    ConfigError naming the option.
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
        authentication: names of options that turn on authentication, for messages.
        is_authenticated: whether callers must authenticate.
        is_encrypted: whether the listener accepts only TLS.
        insecure: whether the user waived TLS and authentication for public addresses.
    """

    authentication: str
    is_authenticated: bool
    is_encrypted: bool
    insecure: bool

    def check(self, option: str, address: str) -> None:
        """Raise ConfigError if a public listener lacks protection; accepts an empty address.

        If ``insecure`` is set, logs a warning instead.

        Raises:
            ConfigError: protection is missing, or the address is malformed.
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
            "%s: %s can be reached from other machines without %s, as --insecure allows",
            option,
            address,
            missing,
        )
