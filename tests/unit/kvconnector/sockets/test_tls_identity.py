"""Certificates of a CA on KV connections: chain and name both count; files may change."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from baton.access.tls import TlsFiles, TlsOptions
from baton.api.errors import ConfigError, TransferError
from kvconnector.transports.base import CertificateFiles
from kvconnector.transports.sockets.identity import identity_of
from tests.fakes.handoff.tls_ends import GRANTED, End, done, meet, reason, where_of, with_where
from tests.fakes.network.certificates import FAR_AHEAD, LONG_AGO, Authority

pytestmark = pytest.mark.medium

P_URI, D_URI = "node/prefill/p0", "node/decode/d0"


def files_of(options: TlsOptions) -> TlsFiles:
    """Looks at the files each time."""
    step = iter(range(10**6))
    return TlsFiles(options, clock=lambda: float(next(step)))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def made() -> Iterator[list[End]]:
    ends: list[End] = []
    yield ends
    for end in ends:
        end.transport.close()


def pair(made: list[End], p_tls: CertificateFiles | None, d_tls: CertificateFiles | None) -> None:
    made += [End("p", tls=p_tls), End("d", tls=d_tls)]
    p, d = made
    p.transport.connect(d.info)
    d.transport.connect(p.info)


def test_peers_whose_certificates_a_ca_has_signed_meet_and_write(
    made: list[End], authority: Authority
) -> None:
    pair(made, files_of(authority.issue("p0", P_URI)), files_of(authority.issue("d0", D_URI)))
    p, d = made
    assert where_of(p.info).identity == b"spiffe://baton/node/prefill/p0"
    meet(p, d)
    meet(d, p)
    d.transport.allow(p.id, GRANTED, [3])
    done(p, d, p.transport.write(d.id, [0], [3], None, GRANTED))
    assert (d.blocks[3] == p.blocks[0]).all()


def test_a_certificate_of_another_ca_is_refused_by_either_end(
    made: list[End], authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path, "other")
    pair(made, files_of(authority.issue("p0", P_URI)), files_of(other.issue("d0", D_URI)))
    p, d = made
    assert "its certificate is refused: " in reason(p, d)
    assert d.heard == []
    d.clock.advance(2.0)
    trusting = files_of(authority.issue("p1", P_URI, trusts=other))  # it believes d0, not d0 it
    third = End("p", tls=trusting)
    made.append(third)
    third.transport.connect(d.info)
    d.transport.connect(third.info)
    assert "unknown ca" in reason(third, d)
    assert any("refused a KV connection from 127.0.0.1" in line for line in caplog.messages)
    assert d.heard == []


def test_a_good_certificate_with_another_name_is_refused(
    made: list[End], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that may join speaks for another one, or answers in its place."""
    pair(made, files_of(authority.issue("p1", P_URI)), files_of(authority.issue("d0", D_URI)))
    p, d = made
    claimed = msgspec.structs.replace(where_of(d.info), identity=b"spiffe://baton/node/decode/d1")
    p.transport.disconnect(d.id)
    p.transport.connect(with_where(d.info, claimed))
    assert "certificate is not the one that the router told us of" in reason(p, d)
    p.transport.disconnect(d.id)
    p.transport.connect(d.info)
    claimed = msgspec.structs.replace(where_of(p.info), identity=b"spiffe://baton/node/prefill/p9")
    d.transport.disconnect(p.id)
    d.transport.connect(with_where(p.info, claimed))
    d.clock.advance(2.0)
    reason(p, d)
    assert d.heard == []
    assert any(f"it is not {p.id}" in line for line in caplog.messages)


def test_one_end_with_files_and_one_without_do_not_meet(
    made: list[End], authority: Authority
) -> None:
    made += [End("p", tls=files_of(authority.issue("p0", P_URI))), End("d")]
    p, d = made
    for one, other in ((p, d), (d, p)):
        with pytest.raises(TransferError, match="--tls-cert is needed on all nodes, or on none"):
            one.transport.connect(other.info)


def test_new_files_are_used_from_the_next_connection_on(
    made: list[End], authority: Authority
) -> None:
    """And a certificate that has expired is refused."""
    p_tls, d_tls = authority.issue("p0", P_URI), authority.issue("d0", D_URI)
    pair(made, files_of(p_tls), files_of(d_tls))
    p, d = made
    meet(p, d)
    (before,) = p.transport._outgoing[d.id].connections()
    shown = before.tls.getpeercert(binary_form=True)
    authority.issue("d0", D_URI)
    p.transport.disconnect(d.id)
    p.transport.connect(d.info)
    meet(p, d)
    (after,) = p.transport._outgoing[d.id].connections()
    assert after.tls.getpeercert(binary_form=True) != shown


@pytest.mark.parametrize("begin", [LONG_AGO, FAR_AHEAD])
def test_an_expired_certificate_or_one_of_the_future_cannot_be_shown(
    authority: Authority, begin: datetime
) -> None:
    with pytest.raises(ConfigError, match="tls_cert"):
        files_of(authority.issue("p0", P_URI, now=begin))


def test_files_without_a_ca_or_a_name_are_refused(authority: Authority) -> None:
    whole = authority.issue("p0", P_URI)
    with pytest.raises(ConfigError, match="needs tls_cert, tls_key and tls_ca"):
        identity_of(files_of(TlsOptions(cert=whole.cert, key=whole.key)))
    nameless = authority.issue("nobody", hosts=())
    with pytest.raises(ConfigError, match="tls_cert: must name the node"):
        identity_of(files_of(nameless))
    with pytest.raises(TransferError, match="a certificate of its own making"):
        identity_of(files_of(whole)).learn(b"")
