"""Real certificates for tests, of real CAs, in files."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from baton.access.dev_certificates import LOCAL_HOSTS, DevCA, Holder
from baton.access.tls import TlsOptions

LONG_AGO = datetime.now(UTC) - timedelta(days=365)
FAR_AHEAD = datetime.now(UTC) + timedelta(days=365)


class Authority:
    """A CA with a folder for the certificates that it issues."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.ca = DevCA()
        self.ca_file = folder / f"{name}.crt"
        self.ca_file.write_bytes(self.ca.certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        uri_path: str = "",
        *,
        hosts: tuple[str, ...] = LOCAL_HOSTS,
        now: datetime | None = None,
        trusts: Authority | None = None,
        requires_clients: bool = False,
    ) -> TlsOptions:
        """Issue a certificate and put its files in place, over earlier ones; return TLS options.

        Args:
            now: begin of its 30 days.
            trusts: authority whose CA file goes with it; None: this one.
        """
        at_that_time = DevCA(now=now)
        at_that_time.key, at_that_time.certificate = self.ca.key, self.ca.certificate
        parts = at_that_time.issue(
            Holder(name=name, uri_paths=(uri_path,) if uri_path else (), hosts=hosts)
        )
        paths = [self.folder / f"{name}.crt", self.folder / f"{name}.key"]
        for path, data in zip(paths, parts, strict=True):
            replace(path, data)
        return TlsOptions(
            cert=str(paths[0]),
            key=str(paths[1]),
            ca=str((trusts or self).ca_file),
            require_client_certs=requires_clients,
        )


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically, as certificate managers do, so that nobody reads half of it."""
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.chmod(0o600)
    os.replace(beside, path)  # noqa: PTH105  # the same; says what matters
