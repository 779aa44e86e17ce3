"""Two ends of a TLS transport that know each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.handoff.tls_ends import End


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    p, d = End("p"), End("d")
    p.transport.connect(d.info)
    d.transport.connect(p.info)
    yield p, d
    p.transport.close()
    d.transport.close()
