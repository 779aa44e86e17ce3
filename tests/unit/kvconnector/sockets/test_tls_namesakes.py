"""A certificate that bears the subject of another's keeps nobody out."""

from __future__ import annotations

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.fakes.handoff.tls_ends import End, meet, where_of, with_where

pytestmark = pytest.mark.medium


def namesake_of(identity: bytes) -> bytes:
    known = x509.load_der_x509_certificate(identity)
    key = ec.generate_private_key(ec.SECP256R1())
    return (
        x509.CertificateBuilder()
        .subject_name(known.subject)
        .issuer_name(known.subject)
        .public_key(key.public_key())
        .serial_number(known.serial_number)
        .not_valid_before(known.not_valid_before_utc)
        .not_valid_after(known.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )


@pytest.mark.parametrize("liar_is_first", [True, False])
def test_a_peer_is_met_beside_one_that_shows_its_name(liar_is_first: bool) -> None:
    p, d, liar = End("p"), End("d"), End("liar")
    namesake = namesake_of(where_of(p.info).identity)
    shown = msgspec.structs.replace(where_of(liar.info), identity=namesake)
    claimed = with_where(liar.info, shown)
    for info in (claimed, p.info) if liar_is_first else (p.info, claimed):
        d.transport.connect(info)
    p.transport.connect(d.info)
    meet(p, d)
    for end in (p, d, liar):
        end.transport.close()
