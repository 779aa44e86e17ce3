"""RayExecutor: the other ranks are actors that a Ray cluster places.

Ray only starts and ends the actors; each actor connects to the engine's process (`meeting.py`),
which sends the step plans over this connection.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from pathlib import Path
from typing import Any

from baton.api.errors import ConfigError, EngineDeadError
from baton.engine_config import EngineConfig
from baton.processes.ray_processes import connect_ray, where_code_is
from engine.executors.devices import device_of_rank
from engine.executors.meeting import Invitation, Meeting, attend, start_all
from engine.executors.ranks import START_TIMEOUT_S, OtherRanks, RanksExecutor

_PLACEMENT_TIMEOUT_S = 120.0


class RankActor:
    """The Ray actor that runs one rank."""

    def serve(self, invitation: bytes, rank: int) -> None:
        """Serve as a rank until the engine has ended."""
        logging.getLogger("ray").setLevel(logging.WARNING)
        attend(Invitation.decode(invitation), rank)


class RayExecutor(RanksExecutor):
    """Ranks on a Ray cluster; see `engine.executors.base.Executor` for the contract."""

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        device = device_of_rank(config, config.leader)
        ray = connect_ray(config.ray_address, log_to_driver=True)
        ranks = [rank for rank in range(config.num_ranks) if rank != config.leader]
        meeting = Meeting(ray.util.get_node_ip_address(), ranks)
        self._meeting = meeting  # Keep the meeting, whose rendezvous store the other ranks use.
        # Claim a GPU, because an actor sees only the GPUs that it claims.
        need = {"CPU": 1.0, "GPU": 1.0} if device.type == "cuda" else {"CPU": 1.0}
        group = ray.util.placement_group([need] * len(ranks), strategy="PACK")
        actors: list[Any] = []

        def end_all() -> None:
            with contextlib.suppress(Exception):  # Ray itself may have ended already
                for actor in actors:
                    ray.kill(actor)
                ray.util.remove_placement_group(group)

        try:
            if not group.wait(_PLACEMENT_TIMEOUT_S):
                raise ConfigError(
                    f"executor: the Ray cluster has no room for {len(ranks)} more ranks of {need}"
                )
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            tasks = []
            for place, rank in enumerate(ranks):
                options = {
                    "num_cpus": need["CPU"],
                    "num_gpus": need.get("GPU", 0.0),
                    "max_restarts": 0,
                    "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=place
                    ),
                    "runtime_env": {"env_vars": where_code_is()},
                }
                actors.append(ray.remote(RankActor).options(**options).remote())
                tasks.append(actors[-1].serve.remote(meeting.invitation.encode(), rank))

            def check() -> None:
                for task in ray.wait(tasks, timeout=0)[0]:  # a rank ended while the engine runs
                    try:
                        ray.get(task)
                    except Exception as error:
                        raise EngineDeadError(f"an actor of Ray failed: {error}") from error
                    raise EngineDeadError("an actor of Ray ended")

            came = meeting.wait(START_TIMEOUT_S, check)
        except BaseException:
            end_all()
            raise
        others = OtherRanks(came, end_all)
        start_all(came, meeting, model_folder, config)
        super().__init__(model_folder, config, others, device, meeting.address)
