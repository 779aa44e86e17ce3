"""A place for a newcomer's mistakes: routers of several kinds, and a folder for files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy
import pytest

from baton import Client, SamplingParams
from baton.access.api_keys import entry_text
from baton.api.errors import BatonError
from baton.processes.free_address import free_address

ROOT = Path(__file__).parents[3]
DEMO_MODEL = ROOT / "examples" / "demo_model"
READY_TIMEOUT_S = 90.0
BATON = [sys.executable, "-m", "baton"]
KEY = "open-sesame"
Body = dict[str, object] | bytes | None


@dataclass(frozen=True, slots=True)
class Site:
    """Routers to make mistakes with, and a folder for files.

    Attributes:
        grpc, http: addresses of a router with simulated nodes, which asks for no key.
        keyed, keyed_http: addresses of a router that asks for API keys and has no nodes.
        tls, tls_http: addresses of a router that speaks TLS only.
        taken: an address on which another program listens.
    """

    folder: Path
    grpc: str
    http: str
    keyed: str
    keyed_http: str
    tls: str
    tls_http: str

    def run(
        self,
        *arguments: str,
        text: bytes = b"",
        environment: dict[str, str] | None = None,
        python: tuple[str, ...] = tuple(BATON),
    ) -> str:
        """Run a command that must fail; return its message in one line, with names filled in."""
        done = subprocess.run(
            [*python, *arguments],
            cwd=self.folder,
            env=clean_environment(self.folder) | (environment or {}),
            input=text,
            capture_output=True,
            timeout=90,
            check=False,
        )
        said = done.stderr.decode("utf-8", "replace")
        assert done.returncode not in (0, -signal.SIGSEGV), said
        assert "Traceback" not in said
        lines = [line for line in said.splitlines() if line.strip()]
        assert lines, "it says nothing"
        return self.named(lines[-1])

    def ask(self, method: str, path: str, body: Body = None, *, key: str = "", at: str = "") -> str:
        """Send a request over HTTP that must be refused; return its status and message."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(
            f"http://{at or self.http}{path}", data, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                raise AssertionError(f"{response.status}: {response.read()!r}")
        except urllib.error.HTTPError as error:
            message = json.loads(error.read())["error"]["message"]
            return self.named(f"{error.code}: {message}")

    def named(self, line: str) -> str:
        """Replace a line's addresses and folders by their names on the page."""
        for name, value in (
            ("ROUTER", self.grpc),
            ("HTTP", self.http),
            ("KEYED", self.keyed),
            ("TLS", self.tls),
            ("FOLDER/", f"{self.folder}/"),
            ("FOLDER", str(self.folder)),
            ("examples/demo_model", str(DEMO_MODEL)),
        ):
            line = line.replace(value, name)
        return line


def clean_environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    native = os.environ.get("BATON_CACHE")
    return kept | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "NO_COLOR": "1",
        "COLUMNS": "200",
        **({"BATON_CACHE": native} if native else {}),
    }


def up(site: Site, *arguments: str, model: str = str(DEMO_MODEL), **more: object) -> str:
    """Run `baton up` on free ports; it must fail."""
    ports = ("--listen", free_address(), "--http-listen", free_address())
    return site.run("up", "--model", model, *ports, *arguments, **more)  # type: ignore[arg-type]


class RunningSite:
    """Start the routers and simulated nodes; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Site:
        folder = self._folder
        subprocess.run(
            [*BATON, "certs", "dev", "--out", str(folder / "certs")],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        keys = folder / "own_keys.toml"
        keys.write_text(entry_text(KEY, "ali"), encoding="utf-8")
        site = Site(folder, *(free_address() for _ in range(6)))
        certs = folder / "certs"
        self._router(site.grpc, site.http, "--served-model-name", "demo")
        self._router(site.keyed, site.keyed_http, "--api-keys-file", str(keys))
        self._router(
            site.tls, site.tls_http,
            "--tls-cert", str(certs / "router.crt"), "--tls-key", str(certs / "router.key"),
        )  # fmt: skip
        self._start("sim-node", "--model", str(DEMO_MODEL), "--router", site.grpc)
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        with Client(site.grpc) as client:
            while True:
                try:
                    client.generate([1, 2, 3], SamplingParams(max_tokens=2), timeout_s=10)
                    return site
                except BatonError:
                    assert time.monotonic() < give_up_at
                    time.sleep(0.2)

    def _router(self, listen: str, http: str, *options: str) -> None:
        where = ("--listen", listen, "--http-listen", http)
        self._start("router", "--model", str(DEMO_MODEL), *where, *options)

    def _start(self, *arguments: str) -> None:
        environment = clean_environment(self._folder)
        with (self._folder / f"{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([*BATON, *arguments], env=environment, stdout=log, stderr=log)
            )

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(timeout=30)


def doctor(site: Site, part: str, **environment: str) -> str:
    """Return what `baton doctor` says of a part of the machine, with its advice."""
    done = subprocess.run(
        [*without_privileges(), *BATON, "doctor", "--json"],
        env=clean_environment(site.folder) | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    findings = json.loads(done.stdout)["findings"]
    found = next(one for one in findings if one["part"] == part)
    return site.named(f"{found['value']}: {found['advice']}")


def without_privileges() -> tuple[str, ...]:
    """Return words before a command that must heed permissions, which root need not."""
    if os.geteuid() != 0:
        return ()
    program = shutil.which("setpriv")
    if program is None:
        pytest.skip("root may read and write everything, and there is no setpriv")
    return (program, "--bounding-set=-dac_override,-dac_read_search")


def written_gguf(site: Site, architecture: str) -> bytes:
    path = site.folder / f"{architecture}-whole.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_tensor("token_embd.weight", numpy.zeros((64, 32), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()
