"""Executors: where workers run. One file and one line here for each; none is imported unasked."""

from baton.registry import Registry
from engine.executors.base import Executor

EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    {
        "multiproc": "engine.executors.multiproc:MultiprocExecutor",
        "uniproc": "engine.executors.uniproc:UniprocExecutor",
    },
)
