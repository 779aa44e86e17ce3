"""ImageHosts: decides which URLs of images may be fetched, and from which addresses.

    URL -> the HTTP client's own parser -> a listed host -> all its addresses

A host name is resolved once, so that the checked addresses are those that the fetch connects to.
Every address must be public or listed. `ImageHosts` opens no connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from yarl import URL

from baton.api.errors import ConfigError, InvalidRequestError

ANY_HOST = "*"
MAX_URL_CHARS = 2_048
_PORTS = {"http": 80, "https": 443}
# The only accepted form of URLs: ASCII without user name, backslash or blank, so that no two
# parsers read a URL differently. Python would read a port such as 8_0 as 80.
_PLAIN = re.compile(
    r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?][!-\[\]-~]*)?"
)
# A listed host: a name or an address, with an optional port.
_HOST = re.compile(r"(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_MAX_LOOKUPS = 4  # maximum number of threads that resolve host names
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class PinnedUrl:
    """A URL that may be fetched, with the checked addresses of its host."""

    url: URL
    addresses: tuple[str, ...]


class ImageHosts:
    """The hosts from which an operator allows images to be fetched.

    Args:
        listed: the allowed hosts, addresses and networks, separated by commas.

    Raises:
        ConfigError: an entry is not a host, an address or a network.
    """

    def __init__(self, listed: str) -> None:
        self._names: set[str] = set()  # listed names, as "host" or "host:port"
        self._networks: list[Network] = []
        self._takes_any = False
        self._threads = ThreadPoolExecutor(_MAX_LOOKUPS, "image-hosts")
        for entry in filter(None, (one.strip().lower() for one in listed.split(","))):
            self._add(entry)

    def __bool__(self) -> bool:
        """Return whether any host is listed, so that some URLs may be fetched."""
        return self._takes_any or bool(self._names) or bool(self._networks)

    def _add(self, entry: str) -> None:
        if entry == ANY_HOST:
            self._takes_any = True
            return
        try:
            self._networks.append(ipaddress.ip_network(_BRACKETS.sub(r"\1", entry)))
            return
        except ValueError:
            pass
        match = _HOST.fullmatch(entry)
        if match is None or not int(match[1] or 1) < 2**16:
            raise ConfigError(
                f"image_hosts: must be hosts, HOST:PORT or networks, got {entry!r:.100}"
            )
        self._names.add(entry)

    async def resolve(self, url: str, field: str) -> PinnedUrl:
        """Return the URL with the addresses from which it may be fetched.

        Args:
            field: the client's field that has the URL.

        Raises:
            InvalidRequestError: the URL is malformed, its host is not listed or is unknown, or one
                of its addresses is not public.
        """
        parsed = self._checked(url, field)
        host, port = parsed.raw_host or "", parsed.port or 0
        try:
            # A thread pool of its own, because a lookup may take long and would hold up other users
            # of the event loop's threads.
            found = await asyncio.get_running_loop().run_in_executor(
                self._threads, _look_up, host, port
            )
        except (OSError, UnicodeError):
            raise InvalidRequestError(field, "the host of the URL is unknown") from None
        addresses = tuple(dict.fromkeys(found))
        if not addresses or not all(map(self._may_connect, addresses)):
            raise InvalidRequestError(
                field, "the host of the URL has an address that is not public (--image-hosts)"
            )
        return PinnedUrl(parsed, addresses)

    def _checked(self, url: str, field: str) -> URL:
        """Parse a URL; raises InvalidRequestError if it is malformed or its host is not listed."""
        if len(url) > MAX_URL_CHARS or not _PLAIN.fullmatch(url):
            raise InvalidRequestError(
                field,
                "must be a data URL, or an http(s) URL in ASCII without user of at most "
                f"{MAX_URL_CHARS} characters",
            )
        try:
            parsed = URL(url)
            host, port = (parsed.raw_host or "").lower(), parsed.port
        except ValueError:
            host = ""
        if not host or port is None:
            raise InvalidRequestError(field, "is no URL with a host")
        if not self._is_listed(host, port, _PORTS[parsed.scheme]):
            raise InvalidRequestError(
                field, "the host of the URL is not listed (--image-hosts): send a data URL"
            )
        return parsed

    def _is_listed(self, host: str, port: int, usual_port: int) -> bool:
        shown = f"[{host}]" if ":" in host else host
        if f"{shown}:{port}" in self._names:
            return True
        if port != usual_port:
            return False
        return self._takes_any or host in self._names or self._has_address(host)

    def _has_address(self, host: str) -> bool:
        """Return whether a host is written as an address that lies in a listed network."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def _may_connect(self, text: str) -> bool:
        """Return whether an address and all addresses embedded in it are public or listed."""
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return False
        if any(address in network for network in self._networks):
            return True
        return all(map(_is_public, _with_embedded(address)))


def _look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


# Prefix of NAT64 addresses, whose last 32 bits are an IPv4 address.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# The range of public IPv6 hosts. Python's `is_global` accepts more, such as site-local addresses
# and the NAT64 prefixes that a site chooses for itself (RFC 8215).
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
# Ranges that Python takes for public: relays of 6to4 (RFC 7526), and documentation (RFC 9637).
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("192.88.99.0/24", "3fff::/20")))
# Bits 32 to 63 of ISATAP addresses (RFC 5214), whose last 32 bits are an IPv4 address. The second
# number has the bit that marks a public IPv4 address.
_ISATAP = (0x00005EFE, 0x02005EFE)


def _is_public(address: Address) -> bool:
    if not address.is_global or address.is_multicast:
        return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.version == 4 or address in _PUBLIC_V6 or address in _NAT64


def _with_embedded(address: Address) -> Iterator[Address]:
    """Yield an address, and the IPv4 addresses to which a gateway would translate it."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if address in _NAT64 or int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
