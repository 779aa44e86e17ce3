"""Executors: where workers run. One file and one line here for each; none is imported unasked."""

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
