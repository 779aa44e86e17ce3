"""A file server with the part of the Hugging Face hub's API that a download needs.

Refuses to know: what is in the files.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-")
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """Hold the server's files, and record requests.

    Attributes:
        url: the server's address.
        files: contents of its only repository, by path.
        stops_after: bytes after which a file's answer hangs until ``resumes`` is set.
        asked: path and first byte of every download.
    """

    url: str
    files: Mapping[str, bytes]
    stops_after: int | None = None
    resumes: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, int]] = field(default_factory=list)


class _Server(ThreadingHTTPServer):
    """Carries what its handlers need."""

    daemon_threads = True

    def __init__(self, repository: str, state: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.state = repository, state


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer with a file's size and digest."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer with the list of files, or with a file from where it is asked for."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        repository, files = self.server.repository, self.server.state.files
        path = unquote(urlsplit(self.path).path)
        name = path.removeprefix(f"/{repository}/resolve/main/")
        if path.startswith(f"/api/models/{repository}/tree/"):
            tree = [
                {"type": "file", "path": one, "size": len(content), "oid": "0" * 40}
                for one, content in files.items()
            ]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif name in files:
            self._send_file(name, files[name], with_body=with_body)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _send_file(self, name: str, content: bytes, *, with_body: bool) -> None:
        state = self.server.state
        facts = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": _COMMIT}
        if not with_body:
            self._send(200, b"", facts | {"Content-Length": str(len(content))})
            return
        found = _RANGE.match(self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        state.asked.append((name, first))
        end = len(content) if state.stops_after is None else state.stops_after
        facts |= {"Content-Length": str(len(content) - first)}
        self._send(206 if found else 200, content[first:end], facts)
        if end < len(content):
            state.resumes.wait(60)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | dict(headers)).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


@contextmanager
def serve_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[HubServer]:
    """Serve a repository's files on loopback."""
    state = HubServer("", files)
    server = _Server(repository, state)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.resumes.set()
        server.shutdown()
        server.server_close()
        thread.join()
