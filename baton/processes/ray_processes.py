"""Processes of ours that Ray places on the machines of its cluster.

An actor starts the process where Ray has put it, and holds the pipe by which that process knows
that it is still wanted: with the actor, its machine's Ray or the one who asked, it ends, too.
Refuses to know: what the processes are for.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.api.errors import ConfigError
from baton.processes.child_processes import (
    ENVIRONMENT_PREFIX,
    PARENT_PIPE_VARIABLE,
    PYTHON_MODULE,
)

_CALL_TIMEOUT_S = 10.0
_POLL_S = 0.05
# A Ray of our own gives out as many as anybody asks for: its cores are shared by all anyhow.
_OWN_CPUS = 64
_OWN_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}


class ProcessActor:
    """Starts one process of ours and looks after it, as Ray knows it."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        read_end, self._write_end = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as there is the process
        self._num_read = 0
        self._process = subprocess.Popen(
            [*PYTHON_MODULE, "baton", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, PARENT_PIPE_VARIABLE: str(read_end)},
            pass_fds=(read_end,),
            start_new_session=True,
        )
        os.close(read_end)

    def pid(self) -> int:
        """Of the process, on its machine."""
        return self._process.pid

    def look(self) -> tuple[int | None, bytes]:
        """Its exit code, if it has ended, and what it has printed since the last look."""
        code = self._process.poll()
        size = os.fstat(self._output.fileno()).st_size
        printed = os.pread(self._output.fileno(), size - self._num_read, self._num_read)
        self._num_read += len(printed)
        return code, printed

    def send_signal(self, number: int) -> None:
        """As `subprocess.Popen` does."""
        self._process.send_signal(number)


class RayProcess:
    """What `subprocess.Popen` is for a process of this machine.

    Args:
        actor: that has started it.
        log: where what it prints goes, as often as somebody asks how it is.
    """

    def __init__(self, ray: Any, actor: Any, log: Path) -> None:
        self._ray, self._actor, self._log = ray, actor, log
        self.returncode: int | None = None
        self.pid: int = self._ask("pid", -1, timeout_s=120.0)  # Ray may have to make room first

    def poll(self) -> int | None:
        """Return its exit code; None: it runs."""
        if self.returncode is None:
            code, printed = self._ask("look", (None, b""))
            with self._log.open("ab") as file:
                file.write(printed)
            if code is not None:
                self.returncode = code
                self._ray.kill(self._actor)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired("baton", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """As `subprocess.Popen` does."""
        if self.returncode is None:
            self._ask("send_signal", None, int(number))

    def kill(self) -> None:
        """As `subprocess.Popen` does."""
        self.send_signal(signal.SIGKILL)

    def _ask(
        self, method: str, otherwise: Any, *args: Any, timeout_s: float = _CALL_TIMEOUT_S
    ) -> Any:
        """Call the actor; when it is gone the process is, too: its machine, or its Ray, ended."""
        try:
            return self._ray.get(getattr(self._actor, method).remote(*args), timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            if method == "pid":
                self._ray.kill(self._actor)
                raise ConfigError("ray_address: the Ray cluster has no room for a node") from None
            return otherwise
        except self._ray.exceptions.RayError as error:
            self.returncode = -signal.SIGKILL
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"error: Ray has ended it: {' '.join(str(error).split())[:300]}\n")
            return otherwise


class RayCluster:
    """A Ray cluster that places processes, until it is closed.

    Args:
        address: of it; empty: that of RAY_ADDRESS, or a new one on this machine.

    Raises:
        ConfigError: Ray is not installed, or nobody is there.
    """

    def __init__(self, address: str) -> None:
        self._ray = ray = connect_ray(address, log_to_driver=False, logging_level="ERROR")
        self.num_machines = sum(node["Alive"] for node in ray.nodes())
        # Nodes find the same cluster by it, wherever they are.
        self.address: str = ray.get_runtime_context().gcs_address
        self.own_host: str = ray.util.get_node_ip_address()
        self._num_gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], num_cpus: int, log: Path
    ) -> RayProcess:
        """Start `baton` with these arguments where there is room, on many machines rather than few.

        Args:
            environment: of which the process gets what gives programs of ours their options.
            num_cpus: cores that it computes on.
            log: of this machine, where what it prints goes.
        """
        ours = {k: v for k, v in environment.items() if k.startswith(f"{ENVIRONMENT_PREFIX}_")}
        actor = self._ray.remote(ProcessActor).options(
            num_cpus=num_cpus,
            num_gpus=self._num_gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": where_code_is()},
        )
        return RayProcess(self._ray, actor.remote(list(arguments), ours), log)

    def close(self) -> None:
        """Leave it; processes that still run end."""
        self._ray.shutdown()


def connect_ray(address: str, **settings: Any) -> Any:
    """Import Ray and have it reach a cluster; raises ConfigError.

    Args:
        address: of it; empty: that of RAY_ADDRESS, or a new one on this machine.
        settings: more arguments of ``ray.init``.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "executor: ray is not installed; pip install 'baton-serve[ray]'"
        ) from error
    if ray.is_initialized():
        return ray
    if not (address or os.environ.get("RAY_ADDRESS")):
        os.environ.update({k: v for k, v in _OWN_SETTINGS.items() if k not in os.environ})
        settings = {"num_cpus": _OWN_CPUS, "include_dashboard": False, **settings}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or None, **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"ray_address: {address or 'auto'}: {why}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has its own idea of it
    return ray


def where_code_is() -> dict[str, str]:
    """What an actor needs of this process's environment to find the same code."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
