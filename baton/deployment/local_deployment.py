"""LocalDeployment: starts a router and its nodes as processes on this machine.

Ray may place nodes on other machines, too. The deployment builds native kernels before it starts
nodes, so that only one process builds them and no node waits. Then it starts the processes, and
waits until all pairs are connected. All processes end when this process ends: they read a pipe of
this process, which closes even if this process is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.access.exposure import check_is_free, split_address
from baton.access.tls import read_tls
from baton.access.tls_options import NO_TLS, TlsOptions
from baton.api.errors import ConfigError, NodeUnavailableError
from baton.checkpoint.model_folder import find_here_or_on_hub
from baton.deployment.last_words import num_oom_kills, why_ended
from baton.kernel_library.state import KernelState, build_kernels, find_kernels
from baton.processes.child_processes import (
    PARENT_PIPE_VARIABLE,
    PYTHON_MODULE,
    THREAD_VARIABLES,
    fleet_environment,
)
from baton.processes.cores import usable_cores
from baton.processes.held_folder import HeldFolder
from baton.processes.program_template import ProgramTemplate, TemplateError
from baton.processes.ray_processes import RayCluster
from baton.serving.rpc import bearer, open_sync_channel
from baton.v1 import admin_pb2, admin_pb2_grpc

_AUDIT_LOG = "BATON_AUDIT_LOG"
STOP_GRACE_S = 6.0  # seconds to stop after open requests have ended
_POLL_S = 0.1
# Modules that every node imports, and that are imported once for all nodes. Given as text, because
# this process needs none of them.
NODE_MODULES = (
    "baton.cli.programs.nodes",
    "decode_node.program",
    "engine.executors.uniproc",
    "models.decoder",
    "models.loading.loader",
    "node_runtime.early_grammars",
    "node_runtime.option_checks",
    "prefill_node.program",
    "pydantic.type_adapter",
    "uvloop",
)
# Function that loads the part of a model that all nodes can share.
NODE_LOAD = "node_runtime.early_grammars:load_early_tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDeploymentConfig:
    """The processes to start, and their options.

    Attributes:
        model: the first base model.
        listen: address of the router.
        http_listen: address of the router's HTTP API; empty: none.
        more_models: further base models, each with nodes of its own, as many as the first model
            has.
        router_args: additional arguments of `baton router`.
        node_args: additional arguments of every `baton prefill` and `baton decode`.
        num_encode: number of encode nodes; if there are any, prefill nodes receive encodings.
        prefill_args, decode_args, encode_args: additional arguments of nodes of one role. Encode
            nodes also get the options of prefill nodes that must be equal on both.
        log_folder: folder for logs; None: a temporary folder.
        admin_token: the router's admin token. Empty: a random token if the router has other keys,
            otherwise no token; the token of the nodes is chosen in the same way.
        drain_timeout_s: seconds that open requests get to end when the deployment stops.
        tls_folder: folder with certificates as `baton certs dev` makes them, of which every caller
            needs one; None: no TLS.
        insecure: whether to listen beyond loopback without TLS or authentication.
        ray_address: Ray cluster that places the nodes, and their ranks if asked to; empty: the
            cluster in RAY_ADDRESS, or a new cluster on this machine; None: no Ray.
        lend_cores: whether nodes also compute on idle cores of other nodes.
    """

    model: str
    listen: str
    http_listen: str = ""
    num_prefill: int = 1
    num_decode: int = 1
    num_encode: int = 0
    more_models: Sequence[str] = ()
    router_args: Sequence[str] = ()
    node_args: Sequence[str] = ()
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    encode_args: Sequence[str] = ()
    log_folder: Path | None = None
    admin_token: str = field(default="", repr=False)
    drain_timeout_s: float = 2.0
    tls_folder: Path | None = None
    insecure: bool = False
    ray_address: str | None = None
    lend_cores: bool = False

    def tls_of(self, name: str) -> TlsOptions:
        """Return the TLS options for the certificate of this name in ``tls_folder``."""
        if self.tls_folder is None:
            return NO_TLS
        own = str(self.tls_folder / name)
        return TlsOptions(cert=f"{own}.crt", key=f"{own}.key", ca=str(self.tls_folder / "ca.crt"))

    @property
    def nodes(self) -> list[tuple[str, str, str]]:
        """Role, name and base model of each node; nodes are numbered over all base models."""
        found = []
        for role, number in (
            ("prefill", self.num_prefill),
            ("decode", self.num_decode),
            ("encode", self.num_encode),
        ):
            found += [
                (role, f"{role[0]}{i}", model)
                for i, model in enumerate(model for model in self.models for _ in range(number))
            ]
        return found

    @property
    def models(self) -> tuple[str, ...]:
        """All base models."""
        return (self.model, *self.more_models)

    @property
    def router_address(self) -> str:
        """Address at which processes on this machine reach the router, with no wildcard as host."""
        host, port = split_address("listen", self.listen)
        return f"{_LOCAL.get(host, host)}:{port}"

    def router_address_on(self, cluster: RayCluster) -> str:
        """Return the router's address for nodes that Ray places; raises ConfigError."""
        host, port = split_address("listen", self.listen)
        if host in _LOCAL:
            return f"{cluster.own_host}:{port}"
        if cluster.num_machines > 1 and host in ("localhost", "127.0.0.1", "[::1]"):
            raise ConfigError(
                f"listen: nodes on the {cluster.num_machines} machines of the Ray cluster cannot "
                f"reach {self.listen}; give an address of this machine, or 0.0.0.0:{port}"
            )
        return self.listen


_LOCAL = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Process(Protocol):
    """The part of `subprocess.Popen` that the deployment uses."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class Child:
    """A process that the deployment has started.

    Attributes:
        log_start: size of the log in bytes before this process began.
        oom_kills: number of the kernel's out-of-memory kills before this process began.
    """

    name: str
    process: Process
    log: Path
    arguments: list[str]
    cores: list[int] | None
    state: str = field(default="starting")
    log_start: int = 0
    oom_kills: int = 0


class LocalDeployment:
    """Context manager that runs the processes of a deployment, and ends them all.

    Args:
        on_build: called before native kernels are built, which takes a minute.

    Attributes:
        kernels: state of native kernels for this machine's CPU.
        log_folder: folder of the processes' logs.
    """

    def __init__(
        self, config: LocalDeploymentConfig, on_build: Callable[[], None] = lambda: None
    ) -> None:
        self.config = config
        self.children: list[Child] = []
        self.kernels = KernelState()
        self._on_build = on_build
        self._held_logs: HeldFolder | None = None
        self._stack = contextlib.ExitStack()
        self._tokens = _tokens(config)
        self._cluster: RayCluster | None = None
        self._template: ProgramTemplate | None = None

    def __enter__(self) -> LocalDeployment:
        # Checked first, because nodes might join another router at this address before ours reports
        # the conflict.
        check_is_free("listen", self.config.listen)
        if self.config.http_listen:
            check_is_free("http_listen", self.config.http_listen)
        for model in self.config.models:
            find_here_or_on_hub(model)  # fails for an unknown model before kernels are built
        self._prepare_kernels()
        folder = self.config.log_folder
        if folder is None:
            self._held_logs = self._stack.enter_context(HeldFolder("baton-up-"))
            folder = self._held_logs.path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "router.log").touch()
        except OSError as error:
            raise ConfigError(f"log_folder: cannot write to {folder}: {error.strerror}") from error
        self.log_folder = folder
        self._read_end, self._write_end = os.pipe()
        try:
            if self.config.ray_address is not None:
                self._cluster = RayCluster(self.config.ray_address)
                self._stack.callback(self._cluster.close)
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def admin_token(self) -> str:
        """API key for operators' calls and for prompts; empty if the router needs no key."""
        return self._tokens["BATON_ADMIN_TOKEN"]

    # ------------------------------------------------------------------ life

    def wait_ready(
        self, timeout_s: float, on_progress: Callable[[list[Child]], None] | None = None
    ) -> None:
        """Wait until all nodes have joined and all pairs are connected.

        Raises:
            ConfigError: a process ended; the message has the reason.
            NodeUnavailableError: the nodes are not ready in time.
        """
        give_up_at = time.monotonic() + timeout_s
        with self._asking() as channel:
            while True:
                self.check()
                self._update_states(channel)
                if on_progress is not None:
                    on_progress(self.children)
                if all(child.state == "ready" for child in self.children):
                    if self._template is not None:
                        self._template.release_memory()
                    return
                if time.monotonic() > give_up_at:
                    self.keep_logs()
                    states = ", ".join(f"{child.name} {child.state}" for child in self.children)
                    raise NodeUnavailableError(
                        f"not ready after {timeout_s:g} s: {states}; logs: {self.log_folder}"
                    )
                time.sleep(_POLL_S)

    def update_states(self) -> None:
        """Ask the router once which nodes are ready."""
        with self._asking() as channel:
            self._update_states(channel)

    def check(self, *, may_leave: bool = False) -> None:
        """Raise ConfigError if a process has ended.

        Args:
            may_leave: whether nodes that ended without error count as removed by an operator.
        """
        for child in self.ended(may_leave=may_leave):
            raise ConfigError(f"{child.name} ended: {self.why_ended(child)}")

    def ended(self, *, may_leave: bool = False) -> list[Child]:
        """Return the processes that have ended.

        Args:
            may_leave: whether nodes that ended without error count as removed by an operator.
        """
        found = []
        for child in list(self.children):
            code = child.process.poll()
            if code == 0 and may_leave and child is not self.children[0]:
                self.children.remove(child)
            elif code is not None:
                found.append(child)
        return found

    def why_ended(self, child: Child) -> str:
        """Return why a process ended, and the path of its log, which `stop` then keeps."""
        self.keep_logs()
        ran_out = num_oom_kills() > child.oom_kills
        code = child.process.poll()
        assert code is not None, "the process runs"
        return why_ended(code, child.log, child.log_start, ran_out=ran_out)

    def keep_logs(self) -> None:
        """Keep a temporary log folder after `stop`, until the next deployment makes one."""
        if self._held_logs is not None:
            self._stack.callback(self._held_logs.leave)  # runs before the folder is removed

    def child(self, name: str) -> Child:
        """Return the process with a name: "router", "p0", "d1" and so on."""
        return next(child for child in self.children if child.name == name)

    def restart(self, name: str, *more_arguments: str) -> Child:
        """Start the process of this name again; kill the running process first.

        Args:
            more_arguments: additional arguments for this start only, such as ``"--listen",
                address``.
        """
        old = self.child(name)
        old.process.kill()
        old.process.wait()
        new = self._spawn(name, old.arguments, old.cores, more_arguments)
        self.children[self.children.index(old)] = new
        return new

    def stop(self) -> None:
        """End all processes in order; a second Ctrl-C kills the processes that still run."""
        try:
            self._stop_gracefully()
        except KeyboardInterrupt:
            for child in self.children:
                child.process.kill()
                child.process.wait()
        self.children.clear()
        if self._template is not None:
            self._template.close()
            self._template = None
        for descriptor in (self._read_end, self._write_end):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._stack.close()

    # ------------------------------------------------------------------ inside

    def _stop_gracefully(self) -> None:
        """Stop the router first, so that no new requests come and nodes finish open ones."""
        grace_s = self.config.drain_timeout_s + STOP_GRACE_S
        for group in (self.children[:1], self.children[1:]):
            for child in group:
                if child.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.send_signal(signal.SIGTERM)
            give_up_at = time.monotonic() + grace_s
            for child in group:
                try:
                    child.process.wait(max(0.0, give_up_at - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.process.kill()
                    child.process.wait()

    def _prepare_kernels(self) -> None:
        """Build native kernels if a node on this machine needs them; a failure is not fatal."""
        has_nodes = self.config.num_prefill + self.config.num_decode > 0
        if not has_nodes or self.config.ray_address is not None or has_nvidia_gpu():
            # There is nothing to build here: a node builds kernels where it runs, if it needs any.
            return
        self.kernels = find_kernels()
        if self.kernels.can_be_built:
            self.kernels = build_kernels(self._on_build)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[grpc.Channel]:
        """Open a channel to the router for operators' calls."""
        operator = read_tls(self.config.tls_of("operator"))
        with open_sync_channel(self.config.router_address, operator) as channel:
            yield channel

    def _start_all(self) -> None:
        config = self.config
        self._start(
            "router",
            [
                "router", *(word for model in config.models for word in ("--model", model)),
                "--listen", config.listen,
                "--http-listen", config.http_listen,
                "--drain-timeout-s", f"{config.drain_timeout_s:g}",
                *_options_of(config.tls_of("router")),
                *(["--tls-require-client-certs"] if config.tls_folder else []),
                *(["--insecure"] if config.insecure else []), *config.router_args,
            ],
            None,
        )  # fmt: skip
        router, where = config.router_address, list[str]()
        if self._cluster is not None:
            router = config.router_address_on(self._cluster)
            where = ["--ray-address", self._cluster.address]
        nodes = config.nodes
        takes = ["--encode-nodes"] if config.num_encode else []
        own = {
            "prefill": [*config.node_args, *takes, *config.prefill_args],
            "decode": [*config.node_args, *config.decode_args],
            "encode": [
                *encode_args_of([*config.node_args, *config.prefill_args]), *config.encode_args,
            ],
        }  # fmt: skip
        num_ranks = [num_ranks_of(own[command]) for command, _, _ in nodes]
        cores = list(divide_cores(sorted(usable_cores()), num_ranks))
        locks = self._core_locks(cores, num_ranks)
        if locks and len(set(map(len, cores))) == 1:
            self._template = self._make_template(len(cores[0]))
        for (command, name, model), share in zip(nodes, cores, strict=True):
            lent = ["--core-locks", locks, "--cpu-list", ",".join(map(str, share))] if locks else []
            # An encode node has only one rank, and lends no cores.
            if command == "encode":
                lent, where_this = [], []
            else:
                where_this = where
            self._start(
                name,
                [
                    command, "--model", model, "--router", router,
                    "--name", name, *_options_of(config.tls_of(name)), *where_this,
                    "--num-threads", "1" if where else str(len(share)), "--drain-timeout-s", "0",
                    *lent, *own[command],
                ],
                None if where else share,
            )  # fmt: skip

    def _core_locks(self, cores: Sequence[Sequence[int]], num_ranks: Sequence[int]) -> str:
        """Return the folder of locks by which nodes share idle cores; empty if they share none.

        Args:
            cores: the cores of each node.
        """
        config = self.config
        arguments = [*config.node_args, *config.prefill_args, *config.decode_args]
        are_placed = self._cluster is not None or any(
            argument.partition("=")[0] == "--cpu-list" for argument in arguments
        )
        every = [core for share in cores for core in share]
        are_shared = max(num_ranks, default=1) > 1 or len(set(every)) < len(every)
        if not config.lend_cores or are_placed or are_shared or len(cores) == 1:
            return ""
        return str(self._stack.enter_context(HeldFolder("baton-cores-")).path)

    def _start(self, name: str, arguments: list[str], cores: list[int] | None) -> None:
        self.children.append(self._spawn(name, arguments, cores))

    def _spawn(
        self,
        name: str,
        arguments: list[str],
        cores: list[int] | None,
        more_arguments: Sequence[str] = (),
    ) -> Child:
        log = self.log_folder / f"{name}.log"
        log_start = log.stat().st_size if log.exists() else 0
        oom_kills = num_oom_kills()
        environment = self._environment()
        if self._cluster is not None and name != "router":
            arguments_now = [*arguments, *more_arguments]
            placed = self._cluster.start(arguments_now, environment, threads_of(arguments_now), log)
            return Child(name, placed, log, arguments, cores, log_start=log_start)
        lends = "--core-locks" in arguments
        if cores is not None:
            environment["OMP_NUM_THREADS"] = str(len(cores))
        # Give each program a separate file for audit lines unless the user chose an audit log, so
        # that the log file has no JSON lines.
        if not _chooses_audit_log(arguments):
            environment[_AUDIT_LOG] = str(self.log_folder / f"{name}.audit.jsonl")
        with log.open("ab") as output:  # a restart appends to the log
            words = [*arguments, *more_arguments]
            process = self._fork(words, environment, output.fileno()) if lends else None
            if process is None:
                process = subprocess.Popen(
                    [*PYTHON_MODULE, "baton", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(self._read_end,),
                    # Children get a group of their own, because Ctrl-C signals a whole group, but
                    # this process ends its children in order.
                    start_new_session=True,
                )
        if cores is not None and not lends:  # the node chooses its cores itself
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, cores)
        return Child(name, process, log, arguments, cores, log_start=log_start, oom_kills=oom_kills)

    def _environment(self) -> dict[str, str]:
        """Return the environment that all children have in common."""
        return {
            **fleet_environment(),
            PARENT_PIPE_VARIABLE: str(self._read_end),
            # Tokens are passed in environment variables, because `ps` shows arguments.
            **self._tokens,
        }

    def _make_template(self, num_threads: int) -> ProgramTemplate:
        """Start the process that forks nodes, each with ``num_threads`` threads."""
        environment = THREAD_VARIABLES | self._environment()
        environment["OMP_NUM_THREADS"] = str(num_threads)
        return ProgramTemplate(
            "baton.cli.app:main",
            NODE_MODULES,
            environment,
            kept=[self._read_end],
            load=[NODE_LOAD, self.config.model],
        )

    def _fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: int
    ) -> Process | None:
        """Fork a node from the template process; return None if there is no template process.

        The template process ends once all nodes are ready. So a node that is restarted later
        imports all modules itself.
        """
        if self._template is None:
            return None
        try:
            return self._template.start(arguments, environment, output)
        except TemplateError:
            return None

    def _update_states(self, channel: grpc.Channel) -> None:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        health = health_pb2_grpc.HealthStub(channel)
        metadata = bearer(self.admin_token)
        try:
            checked = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
            response = stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=2, metadata=metadata)
        except grpc.RpcError:
            return
        joined = {node.node_name: node for node in response.nodes}
        config = self.config
        num_peers = {
            "p": config.num_decode + config.num_encode,
            "d": config.num_prefill,
            "e": config.num_prefill,
        }
        for child in self.children:
            node = joined.get(child.name)
            if child.name == "router":
                is_serving = checked.status == health_pb2.HealthCheckResponse.SERVING
                child.state = "ready" if is_serving else "starting"
            elif node is not None:
                connected = sum(peer.connected for peer in node.peers)
                child.state = "ready" if connected >= num_peers[child.name[0]] else "connecting"


def _tokens(config: LocalDeploymentConfig) -> dict[str, str]:
    """Return the tokens of operators and nodes, by variable of the environment.

    If the router has any keys, a token that is not given is random.
    """
    given = {
        "BATON_ADMIN_TOKEN": config.admin_token or os.environ.get("BATON_ADMIN_TOKEN", ""),
        "BATON_NODE_TOKEN": os.environ.get("BATON_NODE_TOKEN", ""),
    }
    asks_for_keys = {"--api-keys-file", "--node-token", "--admin-token"} & set(config.router_args)
    if not (asks_for_keys or any(given.values()) or os.environ.get("BATON_API_KEYS_FILE")):
        return given
    return {name: token or secrets.token_urlsafe(32) for name, token in given.items()}


def divide_cores(cores: Sequence[int], num_ranks: Sequence[int]) -> Iterator[list[int]]:
    """Return the cores of each node: disjoint sets, or if there are too few, one core per rank.

    Args:
        num_ranks: number of ranks of each node, of which each gets cores of its own.
    """
    in_all = sum(num_ranks)
    size, extra = divmod(len(cores), max(1, in_all))
    first = 0  # total number of ranks of earlier nodes
    for own in num_ranks:
        ranks = range(first, first + own)
        first += own
        if in_all >= len(cores):
            yield sorted({cores[rank % len(cores)] for rank in ranks})
        else:
            starts = [rank * size + min(rank, extra) for rank in (ranks.start, ranks.stop)]
            yield list(cores[starts[0] : starts[1]])


def num_ranks_of(arguments: Sequence[str]) -> int:
    """Return the number of ranks that a node's options ask for; 1 if unclear."""
    sizes = [_last_number(arguments, f"--{kind}-parallel-size") for kind in ("tensor", "pipeline")]
    return math.prod(sizes)


def threads_of(arguments: Sequence[str]) -> int:
    """Return the last value of ``--num-threads``; 1 if the node chooses the number itself."""
    return _last_number(arguments, "--num-threads")


def encode_args_of(arguments: Sequence[str]) -> list[str]:
    """Return the options of prefill nodes that encode nodes must have, too.

    The two kinds of node exchange encodings only if these options are equal.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for option in ("--kv-connector", "--dtype", "--revision"):
        parser.add_argument(option, nargs="?", action="append", default=[])
    for flag in ("--kv-digests", "--no-kv-digests"):
        parser.add_argument(flag, dest="flags", action="append_const", const=flag, default=[])
    found = vars(parser.parse_known_args(list(arguments))[0])
    flags: list[str] = found.pop("flags")
    last = {name: values[-1] for name, values in found.items() if values and values[-1]}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in last.items()]
    return options + flags[-1:]


def _last_number(arguments: Sequence[str], option: str) -> int:
    """Return the last value of an option; 1 if it is missing or no positive number."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument(option, default="1", dest="value")
    found: str = parser.parse_known_args(list(arguments))[0].value
    return max(1, int(found)) if found.isdecimal() else 1


def _options_of(tls: TlsOptions) -> list[str]:
    """Return TLS options in the form of a program's arguments; empty without TLS."""
    if not tls:
        return []
    return ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca]


def _chooses_audit_log(arguments: Sequence[str]) -> bool:
    """Return whether the user chose an audit log, by variable, argument or configuration file."""
    if _AUDIT_LOG in os.environ:
        return True
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name == "--audit-log":
            return True
        if name == "--config":
            # the program itself will report what is wrong with the file
            with contextlib.suppress(OSError, ValueError):
                if "audit_log" in Path(value or following).read_text(encoding="utf-8"):
                    return True
    return False


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU with its driver loaded."""
    return Path("/dev/nvidiactl").exists()
