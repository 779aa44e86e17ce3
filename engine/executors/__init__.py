"""Executors: each runs the workers in another place. To add one, add a file and a line here.

An executor is imported only when it is used.
"""

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
