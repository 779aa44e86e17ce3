"""Executors: each kind runs workers elsewhere. To add a kind, add a file and a line here.

The module of an executor is imported only when the executor is used.
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
