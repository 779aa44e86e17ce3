"""Unit tests of ranks on GPUs: each rank's device and kind of group, with stand-ins for CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.api.errors import ConfigError, EngineDeadError
from baton.engine_config import EngineConfig
from engine.executors import external_launcher, multiproc, rank_process, ranks, ray_actors
from engine.executors.devices import device_of_rank
from engine.executors.rank_process import ENCODER, FROM_RANK, Answer, Attach, Start
from engine.worker import memory_profile
from models.parallel import torch_group
from models.parallel.group import CollectiveError, Ranks, SingleRank

MODEL = Path("no-model")


class Gpus:
    """Stands in for the visible GPUs of a process; each thread has a current device."""

    def __init__(self, num_visible: int) -> None:
        self.num_visible = num_visible
        self._local = threading.local()

    def set_device(self, device: torch.device) -> None:
        self._local.index = device.index

    @property
    def current(self) -> int:
        return getattr(self._local, "index", 0)

    def properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"uuid-{device.index}")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus(4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.num_visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.num_visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "set_device", found.set_device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.properties)
    return found


def options(num_ranks: int = 2, **others: Any) -> EngineConfig:
    return EngineConfig(tensor_parallel_size=num_ranks, **others)


LAUNCHED: dict[str, Any] = {"executor": "external_launcher"}


@pytest.mark.parametrize(
    ("config", "rank", "num_visible", "environment", "expected"),
    [
        (options(4), 3, 4, {}, "cuda:3"),
        (options(), 1, 4, {"LOCAL_RANK": "3"}, "cuda:1"),  # multiproc reads no launcher's variable
        (options(devices="2,0"), 0, 4, {}, "cuda:2"),
        (options(devices="2,0", device="cuda"), 1, 4, {}, "cuda:0"),
        (options(executor="ray"), 1, 4, {}, "cuda:0"),  # Ray shows an actor the actor's GPU only
        (options(**LAUNCHED), 5, 4, {"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, "cuda:1"),
        (options(**LAUNCHED), 5, 4, {"SLURM_LOCALID": "3"}, "cuda:3"),
        (options(**LAUNCHED), 5, 4, {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "cuda:2"),
        (options(**LAUNCHED, devices="3,2"), 5, 4, {"LOCAL_RANK": "1"}, "cuda:2"),
        (options(**LAUNCHED), 5, 4, {}, "cuda:0"),  # Kubernetes: a pod per rank
        (options(**LAUNCHED), 1, 1, {"SLURM_LOCALID": "1"}, "cuda:0"),  # SLURM: one GPU per task
        (options(1), 0, 4, {}, "cuda:0"),
        (options(1, devices="3"), 0, 4, {}, "cuda:3"),
        (options(devices="1,1", rank_sums="own"), 1, 4, {}, "cuda:1"),
        (options(1, device="cuda:2"), 0, 4, {}, "cuda:2"),
        (options(), 1, 0, {"LOCAL_RANK": "1"}, "cpu"),
        (options(device="cpu"), 1, 4, {"LOCAL_RANK": "1"}, "cpu"),
        (options(**LAUNCHED, device="cpu"), 1, 4, {"LOCAL_RANK": "9"}, "cpu"),
    ],
)
def test_a_rank_takes_its_own_device(
    config: EngineConfig,
    rank: int,
    num_visible: int,
    environment: dict[str, str],
    expected: str,
    gpus: Gpus,
) -> None:
    gpus.num_visible = num_visible
    device = device_of_rank(config, rank, environment)
    assert str(device) == expected
    assert gpus.current == (device.index or 0)


@pytest.mark.parametrize(
    ("config", "num_visible", "environment", "problem"),
    [
        (options(3), 2, {}, "devices: 3 ranks on one machine need 3 GPUs, got 2"),
        (options(devices="0,4"), 4, {}, "devices: GPU 4 is named, but 4 are visible here"),
        (options(**LAUNCHED), 2, {"LOCAL_RANK": "2"},
         "devices: LOCAL_RANK is 2, but only 2 GPUs may be used here"),
        (options(**LAUNCHED), 2, {"SLURM_LOCALID": "x"}, "SLURM_LOCALID: must be a number"),
        (options(devices="0,1"), 0, {}, "there is no CUDA device here"),
        (options(device="cuda"), 0, {}, "there is no CUDA device here"),
    ],
)  # fmt: skip
def test_a_lack_of_gpus_is_one_error(
    config: EngineConfig, num_visible: int, environment: dict[str, str], problem: str, gpus: Gpus
) -> None:
    gpus.num_visible = num_visible
    with pytest.raises(ConfigError, match=problem):
        device_of_rank(config, 0, environment)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"devices": "0,x"}, "devices: must be CUDA indices such as 0,1, got '0,x'"),
        ({"devices": "0,,1"}, "devices: must be CUDA indices"),
        ({"devices": "1,1"}, "devices: must name each GPU once without rank_sums own, got '1,1'"),
        ({"rank_sums": "gloo"}, "rank_sums: must be one of auto, own, nccl, got 'gloo'"),
        ({"devices": "0,1", "device": "cpu"}, "devices: device must be cuda or auto, got cpu"),
        ({"devices": "0", "device": "cuda:0", "num_ranks": 1}, "devices: device must be cuda"),
        ({"devices": "0,1", "executor": "ray"}, "devices: Ray chooses the GPUs of its ranks"),
        ({"devices": "0"}, "devices: 2 ranks on one machine need 2 GPUs, got 1"),
        ({"device": "cuda:1"}, "device: cuda:1 is one GPU, but there are 2 ranks"),
    ],
)
def test_options_that_conflict_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        options(**fields)


# ---------------------------------------------------------------------- groups


class FakeNccl:
    """Stands in for NCCL's groups; keeps the rank and the size."""

    class Options:
        """NCCL's options."""

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self.place = rank, size


def connect_all(
    devices: list[str], stage_size: int, folder: Path, **options: Any
) -> list[Ranks | ConfigError]:
    """Connect one rank per device, each on its own thread; return the ranks or errors."""

    def connect(rank: int) -> Ranks | ConfigError:
        try:
            return torch_group.connect(
                rank, len(devices), stage_size, str(folder), torch.device(devices[rank]), **options
            )
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(connect, range(len(devices))))


def test_all_ranks_on_gpus_make_groups_of_nccl(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_group.dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    found = connect_all([f"cuda:{index}" for index in range(4)], 2, tmp_path)
    for rank, of_rank in enumerate(found):
        assert not isinstance(of_rank, ConfigError)
        groups: list[Any] = [of_rank.everyone, of_rank.group]
        assert [group._backend.place for group in groups] == [(rank, 4), (rank % 2, 2)]


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        (["cuda:0", "cpu"], "device: rank 0 is on GPU uuid-0, but rank 1 on cpu"),
        (["cuda:1", "cuda:0", "cuda:1"], "devices: ranks 0 and 2 are both on GPU uuid-1"),
    ],
)
def test_devices_that_cannot_form_a_group_are_refused_on_every_rank(
    devices: list[str], problem: str, gpus: Gpus, tmp_path: Path
) -> None:
    for error in connect_all(devices, len(devices), tmp_path):
        assert isinstance(error, ConfigError)
        assert problem in str(error)


def test_two_ranks_on_one_gpu_are_possible_only_with_own_sums(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses such ranks, so all but the sums goes through the host's memory."""
    asked = list[tuple[str, str]]()

    def map_memory(group: Any, rank_sums: str, device: torch.device, store: Any) -> Any:
        asked.append((type(group).__name__, rank_sums))
        return group

    monkeypatch.setattr(torch_group, "map_memory", map_memory)
    found = connect_all(["cuda:1", "cuda:1"], 2, tmp_path, rank_sums="own")
    assert asked == [("HostGroup", "own")] * 2
    sent = torch.arange(3.0)
    first, second = (one for one in found if not isinstance(one, ConfigError))
    with ThreadPoolExecutor(2) as pool:
        told = pool.submit(first.everyone.broadcast, sent, 0)
        assert torch.equal(second.everyone.broadcast(torch.zeros(3), 0), sent)
        assert torch.equal(told.result(), sent)
        first.everyone.send(sent, 1)
        assert torch.equal(second.everyone.receive(torch.zeros(3), 0), sent)
        told = pool.submit(first.everyone.all_gather, sent)
        assert torch.equal(second.everyone.all_gather(sent + 1), torch.stack([sent, sent + 1]))
        assert torch.equal(told.result(), torch.stack([sent, sent + 1]))
        told = pool.submit(first.everyone.all_reduce, sent.clone())
        assert torch.equal(second.everyone.all_reduce(sent + 1), 2 * sent + 1)


class StoppedGroup(SingleRank):
    """Stands in for a group whose last sum was stopped."""

    def raise_if_stopped(self) -> None:
        raise CollectiveError("another rank is gone")


def test_a_step_with_a_stopped_sum_has_no_result() -> None:
    Ranks().raise_if_stopped()
    stopped = Ranks(group=StoppedGroup())
    step: Any = SimpleNamespace(wait=lambda: "tokens of a sum that has not ended")
    others = ranks.OtherRanks([], lambda: None)
    pending = ranks._Pending(step, others, stopped.raise_if_stopped)
    with pytest.raises(EngineDeadError, match="ranks cannot be reached: another rank is gone"):
        pending.wait()
    assert others.failure is not None


# ---------------------------------------------------------------------- executors


class Connected(Exception):
    """Raised instead of connecting; holds the arguments."""


def refuse_to_connect(*arguments: object, **named: object) -> None:
    raise Connected(*arguments, *named.values())


class FakeRank:
    """Stands in for a rank's process."""

    def __init__(self, start: Start) -> None:
        self.rank, self.shared = start.rank, start.shared
        self.messages, self._theirs = Pipe()

    def why_gone(self) -> None:
        return None

    def end_rank(self) -> None:
        self.messages.close()
        self._theirs.close()


def test_the_leader_connects_with_its_own_gpu_and_without_shared_memory(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[FakeRank]()

    def start(first: Start) -> FakeRank:
        started.append(FakeRank(first))
        return started[-1]

    monkeypatch.setattr(multiproc, "RankProcess", start)
    monkeypatch.setattr(ranks, "connect", refuse_to_connect)
    config = options(2, pipeline_parallel_size=2)
    with pytest.raises(Connected) as found:
        multiproc.MultiprocExecutor(MODEL, config)
    rank, num_ranks, stage_size, _, device, shared, rank_sums = found.value.args
    assert (rank, num_ranks, stage_size, rank_sums) == (2, 4, 2, "auto")
    assert (str(device), shared) == ("cuda:2", None)
    assert [(other.rank, other.shared) for other in started] == [(0, None), (1, None), (3, None)]


def test_no_rank_is_started_if_there_are_too_few_gpus(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.num_visible = 1
    monkeypatch.setattr(multiproc, "RankProcess", refuse_to_connect)
    with pytest.raises(ConfigError, match="need 2 GPUs, got 1"):
        multiproc.MultiprocExecutor(MODEL, options())


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_launched_rank_without_a_gpu_waits_for_nobody(
    rank: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**place, "LOCAL_RANK": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(external_launcher, "launchers_store", refuse_to_connect)
    with pytest.raises(ConfigError, match="LOCAL_RANK is 4, but only 4 GPUs"):
        external_launcher.ExternalLauncherExecutor(MODEL, options(**LAUNCHED))


@pytest.mark.parametrize(
    ("num_visible", "need"), [(4, {"CPU": 1.0, "GPU": 1.0}), (0, {"CPU": 1.0})]
)
def test_actors_claim_gpus_if_the_leader_has_one(
    num_visible: int, need: dict[str, float], gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.num_visible = num_visible
    claimed: list[list[dict[str, float]]] = []

    def claim(bundles: list[dict[str, float]], strategy: str) -> SimpleNamespace:
        claimed.append(bundles)
        return SimpleNamespace(wait=lambda timeout_s: False)

    util = SimpleNamespace(
        get_node_ip_address=lambda: "127.0.0.1",
        placement_group=claim,
        remove_placement_group=lambda group: None,
    )
    monkeypatch.setattr(ray_actors, "connect_ray", lambda address, **_: SimpleNamespace(util=util))
    with pytest.raises(ConfigError, match="no room for 1 more ranks"):
        ray_actors.RayExecutor(MODEL, options(executor="ray"))
    assert claimed == [[need]]


class FakeWorker:
    """Stands in for a worker; keeps the device."""

    def __init__(
        self, folder: Path, config: EngineConfig, device: torch.device, group: Any
    ) -> None:
        assert group.device == device
        self.device = device
        self.kv_memory = SimpleNamespace(num_blocks=7)


_attached: list[tuple[str, int]] = []


def note_device(beside: Connection, memory: object, argument: bytes) -> None:
    """Note the current device of the thread that serves KV hand-offs."""
    _attached.append((argument.decode(), torch.cuda.current_device()))
    beside.send_bytes(b"noted")


def test_another_rank_connects_computes_and_sends_kv_on_its_own_gpu(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*places: object, device: torch.device, **_: object) -> SimpleNamespace:
        return SimpleNamespace(device=device, abort=lambda: None)

    monkeypatch.setattr(rank_process, "connect", connect)
    monkeypatch.setattr(rank_process, "Worker", FakeWorker)
    (messages, theirs), (beside, its_beside), is_over = Pipe(), Pipe(), threading.Event()
    serve: Callable[..., None] = rank_process.serve
    rank = threading.Thread(target=serve, args=(theirs, its_beside, is_over.wait))
    rank.start()
    config = options(4, devices="0,1,3,2")
    messages.send_bytes(ENCODER.encode(Start(str(MODEL), config, 2, "no-folder", 30)))
    assert FROM_RANK.decode(messages.recv_bytes()) == Answer(7)
    messages.send_bytes(ENCODER.encode(Attach(f"{__name__}:note_device", b"rank 2")))
    assert FROM_RANK.decode(messages.recv_bytes()) == Answer()
    assert beside.recv_bytes() == b"noted"
    assert _attached == [("rank 2", 3)]
    messages.close()
    rank.join(10)
    is_over.set()


def test_kv_memory_is_measured_on_the_ranks_own_gpu(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_of_total = {0: (1, 10), 3: (6, 20)}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free_of_total[device.index])
    device = device_of_rank(options(4), 3, {})
    assert memory_profile._total_and_used(device) == (20, 14)
