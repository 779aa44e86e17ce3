"""Replaces PyTorch's index of CPU builds: serves local wheels under the index's host name.

Fresh systems find this server by their hosts file, and trust its certificate. So commands that name
PyTorch's index run unchanged, even if PyTorch's index cannot be reached.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from baton.access.dev_certificates import DevCA, Holder

HOST = "download.pytorch.org"
ADDRESS = "127.0.0.77"  # the server's loopback address
PREFIX = "/whl/cpu"


@contextlib.contextmanager
def torch_index(wheels: Path) -> Iterator[bytes]:
    """Serve a folder's wheels during the ``with`` block; yield the certificate as PEM.

    Raises OSError if port 443 cannot be bound.
    """
    ca = DevCA(days=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "server.crt", Path(folder) / "server.key"
        for path, content in zip(files, ca.issue(Holder(name="index", hosts=(HOST,))), strict=True):
            path.write_bytes(content)
        context.load_cert_chain(*files)
    server = ThreadingHTTPServer((ADDRESS, 443), functools.partial(_Handler, wheels))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield ca.certificate.public_bytes(Encoding.PEM)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(SimpleHTTPRequestHandler):
    """Answers with a page of links to a project's wheels, or with a wheel."""

    def __init__(self, wheels: Path, *arguments: Any) -> None:
        self._wheels = wheels
        super().__init__(*arguments, directory=str(wheels))

    def translate_path(self, path: str) -> str:
        """Return the path of a wheel; the folder has no subfolders."""
        return super().translate_path(f"/{path.rpartition('/')[2]}")

    def do_GET(self) -> None:
        """Send a wheel, or the links to a project's wheels; 404 if there are none."""
        if self.path.endswith(".whl"):
            super().do_GET()
            return
        project = self.path.removeprefix(PREFIX).strip("/").replace("-", "_")
        names = [path.name for path in self._wheels.glob(f"{project}-*.whl")]
        if not project or not names:
            self.send_error(404)
            return
        page = "".join(f'<a href="{name.replace("+", "%2B")}">{name}</a>\n' for name in names)
        content = f"<!DOCTYPE html>\n{page}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print no line for a request."""
