"""A server with the API of S3 (moto), which refuses, stands still or dies when a test says so."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import obstore
from moto.server import DomainDispatcherApplication, create_backend_app
from obstore.store import S3Store
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "kv-runs"
SECRET_KEY = "do-not-log-me"


class _QuietHandler(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing."""


class S3Server:
    """A server on this machine, with one bucket.

    Attributes:
        url: address of the server.
        status: status of all answers; 0: as the server answers.
        gate: while this event is unset, requests for objects' bytes stand still.
        num_more: how many bytes too many each answer with a part of an object has.
        num_sent: how many of these bytes were sent.
        requests: methods and paths of all requests.
    """

    def __init__(self) -> None:
        self.status = self.num_more = self.num_sent = 0
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[str] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_QuietHandler
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.post("moto-api/reset")
        self.post(BUCKET, method="PUT")

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(f"{method} {path}")
        if method == "GET" and "HTTP_RANGE" in environ:
            self.gate.wait(60)
        if self.status and not path.startswith("/moto-api"):
            start(f"{self.status} Faulty", [("Content-Type", "application/xml")])
            quoted = environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
            return [f"<Error><Code>Faulty</Code><Quoted>{quoted}</Quoted></Error>".encode()]
        if self.num_more and "HTTP_RANGE" in environ:
            return self._answer_too_much(environ, start)
        answer: Iterable[bytes] = self._app(environ, start)
        return answer

    def _answer_too_much(
        self, environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterator[bytes]:
        def start_longer(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            found = dict(headers)
            length = str(int(found["Content-Length"]) + self.num_more)
            return start(status, [*{**found, "Content-Length": length}.items()], *rest)

        yield b"".join(self._app(environ, start_longer))
        left = self.num_more
        while left:
            piece = b"x" * min(left, 2**16)
            yield piece
            left -= len(piece)
            self.num_sent += len(piece)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that clients need."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "reader",
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_SESSION_TOKEN": SECRET_KEY,
        }

    def post(self, path: str, body: bytes = b"", method: str = "POST") -> None:
        """Send one plain request."""
        kind = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/{path}", body, kind, method=method)
        urllib.request.urlopen(request, timeout=30).close()

    def deny(self, *, is_on: bool) -> None:
        """Let the server know no access key, or take every key."""
        self.post("moto-api/reset-auth", b"0" if is_on else b"inf")

    def client(self) -> S3Store:
        """Return a client of the bucket, for tests that look at objects or spoil them."""
        return S3Store(
            BUCKET,
            endpoint=self.url,
            region="us-east-1",
            access_key_id="tester",
            secret_access_key="tester",
            client_options={"allow_http": True},
        )

    def object_names(self) -> list[str]:
        """Return the names of all objects in the bucket."""
        return [found["path"] for page in obstore.list(self.client()) for found in page]

    def stop(self) -> None:
        """End the server; a second call does nothing."""
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


def secret_file(folder: Path) -> str:
    """Make a file with a key of digests, and return its path."""
    path = folder / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return str(path)
