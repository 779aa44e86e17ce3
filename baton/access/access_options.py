"""Help texts of access options that several programs share. Imports nothing, so --help is fast."""

from __future__ import annotations

STANDARD_OUTPUT = "-"
AUDIT_LOG_HELP = (
    "File of the audit log, JSON lines: who joined, looked, changed and failed to. Opened again on "
    'SIGHUP. "-": standard output; "": none.'
)
INSECURE_HELP = "Listen where other machines can connect though TLS or authentication is missing."
