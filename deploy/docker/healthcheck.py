#!/usr/bin/env python3
"""Ask a program of Baton in the same container whether it lives: exit code 0, or 1 and a line.

``BATON_HEALTH_URL`` (or the first argument) is the address to ask. Like kubelets, the program does
not verify a certificate, because the server is in its own container. The program imports only the
standard library, so it starts fast.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    """Return 0 if the program answers 200."""
    url = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("BATON_HEALTH_URL", "")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=TIMEOUT_S):
            return 0
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
