"""TlsOptions: the certificate, key and CAs of a program. Does not read the files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from baton.api.errors import ConfigError
from baton.options import option

CERT_VARIABLE = "BATON_TLS_CERT"
KEY_VARIABLE = "BATON_TLS_KEY"
CA_VARIABLE = "BATON_TLS_CA"
SYSTEM_CAS = "system"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Options of a program's TLS: its certificate and trusted CAs. Without options there is no TLS.

    Raises:
        ConfigError: the options contradict each other. The files are checked when they are read.
    """

    cert: str = option(
        "",
        name="tls_cert",
        help="PEM file of this program's certificate and its intermediate CAs; reloaded when it "
        "changes. No TLS if neither this nor --tls-ca is given.",
    )
    key: str = option(
        "", name="tls_key", help="PEM file of the private key of --tls-cert, unencrypted."
    )
    ca: str = option(
        "",
        name="tls_ca",
        help="PEM file of the CAs that must have signed the other side's certificate; system: "
        "this machine's CAs (clients only).",
    )
    require_client_certs: bool = option(
        False,
        name="tls_require_client_certs",
        help="Serve only clients with a certificate that a CA of --tls-ca has signed. On "
        "--node-listen, nodes and `baton admin` always need one.",
    )

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            missing, given = ("tls_key", "tls_cert") if self.cert else ("tls_cert", "tls_key")
            raise ConfigError(f"{missing}: must be given, too, when {given} is")
        if self.require_client_certs and (not self.ca or self.ca == SYSTEM_CAS):
            raise ConfigError(
                "tls_require_client_certs: needs tls_ca, the file of the CAs that clients' "
                "certificates are signed by"
            )

    @classmethod
    def from_environment(cls) -> TlsOptions:
        """Read a client's options from ``BATON_TLS_CERT``, ``BATON_TLS_KEY``, ``BATON_TLS_CA``."""
        read = os.environ.get
        return cls(
            cert=read(CERT_VARIABLE, ""), key=read(KEY_VARIABLE, ""), ca=read(CA_VARIABLE, "")
        )

    def __bool__(self) -> bool:
        return bool(self.cert or self.ca)

    @property
    def verifies_clients(self) -> bool:
        """Return whether a server can identify clients by their certificates."""
        return bool(self.cert and self.ca and self.ca != SYSTEM_CAS)

    def check_server(self) -> None:
        """Raise ConfigError for options that a client may have but a server may not."""
        if self.ca and not self.cert:
            raise ConfigError("tls_cert: must be given with tls_ca: a server has to show one")
        if self.ca == SYSTEM_CAS:
            raise ConfigError(
                f"tls_ca: {SYSTEM_CAS!r} would let in every holder of a public CA's certificate; "
                "a server needs a file of its own CAs"
            )


NO_TLS = TlsOptions()
ONLY_ROUTERS = ("tls_require_client_certs",)  # names of options that only the router has
