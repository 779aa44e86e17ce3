"""Executors: where workers run. Each has a file and a line here; none is imported before use."""

from baton.registry import Registry
from engine.executors.base import Executor

EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    {
        "external_launcher": "engine.executors.external_launcher:ExternalLauncherExecutor",
        "multiproc": "engine.executors.multiproc:MultiprocExecutor",
        "ray": "engine.executors.ray_actors:RayExecutor",
        "uniproc": "engine.executors.uniproc:UniprocExecutor",
    },
)
