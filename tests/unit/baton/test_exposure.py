"""Unit tests of the addresses that others can reach, and of what is refused on these."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from baton.access.exposure import Exposure, check_is_free, is_public
from baton.api.errors import ConfigError


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1.2.3",
        "127.1",  # as inet_aton reads it: 127.0.0.1
        "localhost",
        "LOCALHOST",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
    ],
)
def test_loopback_in_every_spelling(host: str) -> None:
    assert not is_public("listen", f"{host}:1")


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "0",
        "[::]",
        "[::0]",
        "[::ffff:0.0.0.0]",
        "[::ffff:10.0.0.1]",
        "10.0.0.1",
        "192.168.1.1",
        "128.0.0.1",
        "[fe80::1%eth0]",
        "[2001:db8::1]",
        "127.no.such.host.invalid",  # begins as a loopback address does, and is a name
        "no.such.host.invalid",
    ],
)
def test_beyond_loopback_in_every_spelling(host: str) -> None:
    assert is_public("listen", f"{host}:1")


def test_a_name_is_as_public_as_the_most_public_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {"here": ["127.0.0.1", "::1"], "both": ["127.0.0.1", "10.0.0.1"]}

    def resolve(host: str, port: int, **options: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert not is_public("listen", "here:1")
    assert is_public("listen", "both:1")


@pytest.mark.parametrize(
    "address",
    [
        "unix:5",
        "unix:/tmp/socket:5",
        "unix-abstract:x:5",
        "ipv4:0.0.0.0:5",
        "dns:localhost:5",
        "*:5",
        "::1:5",
        "[::1:5",
        "[localhost]:5",
        "127.0.0.1,0.0.0.0:5",
        "127.0.0.1/8:5",
        " 127.0.0.1:5",
        "127.0.0.1\n:5",
        "127.0.0.1:\N{ARABIC-INDIC DIGIT FIVE}",
    ],
)
def test_what_is_no_host_and_port_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen: must be host:port"):
        is_public("listen", address)


def exposure(**fields: bool) -> Exposure:
    defaults = {"is_authenticated": False, "is_encrypted": False, "insecure": False}
    return Exposure(authentication="--api-keys-file", **{**defaults, **fields})


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({}, "needs TLS (--tls-cert, --tls-key) and authentication (--api-keys-file)"),
        ({"is_encrypted": True}, "needs authentication (--api-keys-file)"),
        ({"is_authenticated": True}, "needs TLS (--tls-cert, --tls-key)"),
    ],
)
def test_what_is_missing_beyond_loopback_is_refused_and_named(
    fields: dict[str, bool], missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as caught:
        exposure(**fields).check("http_listen", "0.0.0.0:8000")
    assert str(caught.value).startswith("http_listen: 0.0.0.0:8000 can be reached from other")
    assert missing + "; or say --insecure" in str(caught.value)
    caplog.set_level(logging.WARNING)
    exposure(**fields, insecure=True).check("http_listen", "0.0.0.0:8000")
    [record] = caplog.records
    assert missing.removeprefix("needs ") in record.message


def test_loopback_needs_nothing_and_what_has_all_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exposure().check("listen", "127.0.0.1:1")
    exposure().check("listen", "")  # nothing listens
    exposure(is_authenticated=True, is_encrypted=True).check("listen", "0.0.0.0:1")
    assert not caplog.records


@pytest.mark.medium
def test_of_a_names_addresses_one_is_enough_as_long_as_the_others_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        addresses = {"here": "127.0.0.2", "taken": "127.0.0.1", "elsewhere": "192.0.2.1"}

        def resolve(host: str, port: int, **options: Any) -> list[Any]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
            return [(*kind, (addresses[name], port)) for name in host.split("-")]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        check_is_free("listen", f"here-elsewhere:{port}")
        check_is_free("listen", "here:0")
        for host, words in [("taken", "in use"), ("here-taken", "in use"), ("elsewhere", "assign")]:
            with pytest.raises(ConfigError, match=f"listen: cannot listen on .*{words}"):
                check_is_free("listen", f"{host}:{port}")
