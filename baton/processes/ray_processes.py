"""Ray processes: start Baton's processes on machines of a Ray cluster.

For each process, Ray places an actor on a machine. The actor starts the process and holds the pipe
that tells the process whether its parent lives. So the process ends when the actor ends, when Ray
ends on that machine, or when the program that asked for the process ends. Does not know what the
processes do.
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
# Number of CPUs of a new cluster on this machine: more than exist, because processes share cores.
_OWN_CPUS = 64
_OWN_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}


class ProcessActor:
    """A Ray actor that starts and watches one process."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        read_end, self._write_end = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # kept as long as the process
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
        """Return the id of the process on its machine."""
        return self._process.pid

    def look(self) -> tuple[int | None, bytes]:
        """Return the exit code (None while it runs), and the output since the last call."""
        code = self._process.poll()
        size = os.fstat(self._output.fileno()).st_size
        printed = os.pread(self._output.fileno(), size - self._num_read, self._num_read)
        self._num_read += len(printed)
        return code, printed

    def send_signal(self, number: int) -> None:
        """Send a signal, as `subprocess.Popen` does."""
        self._process.send_signal(number)


class RayProcess:
    """A process that Ray placed, with the methods of `subprocess.Popen` that Baton uses.

    Args:
        actor: the actor that started the process.
        log: file for the process's output; each `poll` appends to it.
    """

    def __init__(self, ray: Any, actor: Any, log: Path) -> None:
        self._ray, self._actor, self._log = ray, actor, log
        self.returncode: int | None = None
        # The first answer may take long, because Ray may have to free resources before.
        self.pid: int = self._ask("pid", -1, timeout_s=120.0)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            code, printed = self._ask("look", (None, b""))
            with self._log.open("ab") as file:
                file.write(printed)
            if code is not None:
                self.returncode = code
                self._ray.kill(self._actor)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; raises subprocess.TimeoutExpired."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired("baton", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, as `subprocess.Popen` does."""
        if self.returncode is None:
            self._ask("send_signal", None, int(number))

    def kill(self) -> None:
        """Kill the process, as `subprocess.Popen` does."""
        self.send_signal(signal.SIGKILL)

    def _ask(
        self, method: str, otherwise: Any, *args: Any, timeout_s: float = _CALL_TIMEOUT_S
    ) -> Any:
        """Call a method of the actor; return ``otherwise`` if actor and process are gone."""
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
    """A connection to a Ray cluster that places processes.

    Args:
        address: the cluster's address; empty: RAY_ADDRESS, or a new cluster on this machine.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str) -> None:
        self._ray = ray = connect_ray(address, log_to_driver=False, logging_level="ERROR")
        self.num_machines = sum(node["Alive"] for node in ray.nodes())
        # Address at which nodes on other machines find the cluster.
        self.address: str = ray.get_runtime_context().gcs_address
        self.own_host: str = ray.util.get_node_ip_address()
        self._num_gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], num_cpus: int, log: Path
    ) -> RayProcess:
        """Start `baton` with these arguments on a machine with enough free CPUs.

        Ray spreads processes over its machines.

        Args:
            environment: environment variables, of which the process gets those for Baton's options.
            num_cpus: number of CPUs that the process uses.
            log: file on this machine for its output.
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
        """Disconnect from the cluster, which ends the processes that still run."""
        self._ray.shutdown()


def connect_ray(address: str, **settings: Any) -> Any:
    """Import Ray and connect to a cluster; raises ConfigError.

    Args:
        address: the cluster's address; empty: RAY_ADDRESS, or a new cluster on this machine.
        settings: additional arguments of ``ray.init``.
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
        signal.signal(signal.SIGTERM, before)  # restore the handler that Ray replaced
    return ray


def where_code_is() -> dict[str, str]:
    """Return the Ray environment in which an actor can import this code."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
