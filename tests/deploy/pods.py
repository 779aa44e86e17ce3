"""Pods without a cluster: a container's command line as a process, with an address of its own.

What a kubelet does: mounts, environment, probes, preStop, SIGTERM. Each pod has an address in
127.0.0.0/8; what it says of 127.0.0.1 is an address that only it has.
"""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baton.processes.child_processes import PYTHON_MODULE

Document = dict[str, Any]
_UNCHECKED = ssl.create_default_context()  # kubelets do not verify
_UNCHECKED.check_hostname, _UNCHECKED.verify_mode = False, ssl.CERT_NONE


@dataclass(slots=True)
class Cluster:
    """The environment that pods run in.

    Attributes:
        folder: folder of the volumes.
        secrets: texts of the secrets, by name.
        model: mounted as the model's folder.
        cache: folder of the user's model cache on this machine.
        names: addresses by the name that stands for them.
        environment: variables of every process, besides its own.
    """

    folder: Path
    documents: list[Document]
    secrets: dict[str, dict[str, str]]
    model: Path
    cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "baton")
    names: dict[str, list[str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    _num_pods: int = 0

    def workload(self, component: str) -> Document:
        (found,) = (
            one
            for one in self.documents
            if one["kind"] == "Deployment" and one["metadata"]["name"].endswith(f"-{component}")
        )
        return found

    def next_address(self) -> tuple[str, str]:
        """Return an address for a pod, and an address for its loopback."""
        self._num_pods += 1
        return f"127.0.7.{self._num_pods}", f"127.0.8.{self._num_pods}"


class Pod:
    """One pod of a workload, from its start to its end."""

    def __init__(self, cluster: Cluster, component: str, name: str) -> None:
        template = cluster.workload(component)["spec"]["template"]
        self.name, self.component = name, component
        self.spec = template["spec"]
        self.labels = template["metadata"]["labels"]
        (self.container,) = self.spec["containers"]
        self.address, self._loopback = cluster.next_address()
        self._cluster = cluster
        self.folder = cluster.folder / name
        self.folder.mkdir()
        self.log = self.folder / "log"
        self._has_started = False
        self._failures = 0  # of the liveness probe, in a row
        environment = self._environment()
        arguments = [
            word
            for argument in self.container["args"]
            for word in self._resolved(self._local(_expand(argument, environment)))
        ]
        program, *command = self.container["command"]
        assert program == "baton"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*PYTHON_MODULE, "baton", *command, *arguments],
                stdout=log,
                stderr=log,
                env=cluster.environment | environment,
            )

    # ------------------------------------------------------------------ what it is given

    def _environment(self) -> dict[str, str]:
        given: dict[str, str] = {}
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        for entry in self.container["env"]:
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                given[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                key = source["secretKeyRef"]
                given[entry["name"]] = self._cluster.secrets[key["name"]][key["key"]]
            else:
                given[entry["name"]] = self._local(entry["value"])
        return given

    def _local(self, text: str) -> str:
        """With paths of mounts and addresses as they are here."""
        for mount in sorted(self.container["volumeMounts"], key=lambda one: -len(one["mountPath"])):
            path = mount["mountPath"]
            pattern = rf"(?<![\w/]){re.escape(path)}(?=/|$)"
            if re.search(pattern, text):
                text = re.sub(pattern, str(self._volume(mount["name"])), text, count=1)
                break
        here = {"0.0.0.0:": self.address, "127.0.0.1:": self._loopback}
        for elsewhere, address in here.items():
            text = text.replace(elsewhere, f"{address}:")
        return text

    def _resolved(self, argument: str) -> list[str]:
        """A name that stands for several addresses is as many arguments, as a resolver has it."""
        for name, addresses in self._cluster.names.items():
            if f"={name}:" in argument:
                return [argument.replace(f"={name}:", f"={address}:") for address in addresses]
        return [argument]

    def _volume(self, name: str) -> Path:
        (volume,) = (one for one in self.spec["volumes"] if one["name"] == name)
        path = self.folder / name
        if path.exists():
            return path
        path.mkdir()
        if "configMap" in volume:
            (found,) = (
                one
                for one in self._cluster.documents
                if one["kind"] == "ConfigMap"
                and one["metadata"]["name"] == volume["configMap"]["name"]
            )
            files = found["data"]
        elif "secret" in volume:
            secret = self._cluster.secrets[volume["secret"]["secretName"]]
            items = volume["secret"].get("items")
            files = {item["path"]: secret[item["key"]] for item in items} if items else dict(secret)
        elif "persistentVolumeClaim" in volume:
            (path / "model").symlink_to(self._cluster.model)
            files = {}
        else:
            files = {}
        if name == "cache" and self._cluster.cache.is_dir():
            (path / "baton").symlink_to(self._cluster.cache)  # an image has kernels that were built
        for file, text in files.items():
            (path / file).write_text(text)
            (path / file).chmod(0o440)
        return path

    # ------------------------------------------------------------------ what a kubelet does

    def probe(self, kind: str) -> bool:
        """Return whether a probe succeeds."""
        probe = self.container[f"{kind}Probe"]
        action = probe["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        url = f"{action['scheme'].lower()}://{self.address}:{ports[action['port']]}{action['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"], context=_UNCHECKED):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def start(self, timeout_s: float) -> None:
        """Wait for the startup probe."""
        give_up_at = time.monotonic() + timeout_s
        while not self.probe("startup"):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up_at, self.log.read_text()
            time.sleep(0.3)
        self._has_started = True

    @property
    def is_alive(self) -> bool:
        """Ask the liveness probe; its limit of failures in a row ends the container.

        Nobody asks before the startup probe has said yes.
        """
        if not self._has_started:
            return True
        self._failures = 0 if self.probe("liveness") else self._failures + 1
        threshold: int = self.container["livenessProbe"]["failureThreshold"]
        return self._failures < threshold

    def end(self) -> float:
        """PreStop, SIGTERM, and as long as it may take; gives the seconds that it took."""
        began = time.monotonic()
        grace_s = self.spec["terminationGracePeriodSeconds"]
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook:
            subprocess.run(hook["exec"]["command"], check=True, timeout=grace_s)
        self.process.send_signal(signal.SIGTERM)
        left_s = grace_s - (time.monotonic() - began)
        assert self.process.wait(left_s) == 0, self.log.read_text()
        return time.monotonic() - began

    def kill(self) -> None:
        """Kill the process, whatever it does."""
        self.process.kill()
        self.process.wait()

    def listening(self) -> set[tuple[str, int]]:
        """Return protocol and port of each socket that others can reach, without loopback."""
        found = set()
        main = psutil.Process(self.process.pid)
        for one in (main, *main.children(recursive=True)):
            for connection in one.net_connections("inet"):
                is_tcp = connection.type.name == "SOCK_STREAM"
                if (is_tcp and connection.status != psutil.CONN_LISTEN) or not connection.laddr:
                    continue
                if not is_tcp and connection.raddr:
                    continue
                if connection.laddr.ip.removeprefix("::ffff:") != self._loopback:
                    found.add(("TCP" if is_tcp else "UDP", connection.laddr.port))
        return found


def allowed_ports(documents: list[Document], component: str) -> set[tuple[str, int]]:
    """Return the ports that a component's NetworkPolicy lets in, with each port of a range."""
    (policy,) = (
        one
        for one in documents
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith(f"-{component}")
    )
    return {
        (port["protocol"], number)
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
        for number in range(port["port"], port.get("endPort", port["port"]) + 1)
    }


def _expand(text: str, environment: dict[str, str]) -> str:
    """Replace ``$(NAME)`` by the variable's value, as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)
