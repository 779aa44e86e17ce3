"""A rank in its own process: computes the plans that the engine's process sends.

    python -m engine.executors.rank_process 7 9 11      (7: messages, 9: the life line,
                                                         11: for functions beside the steps)

The numbers are file descriptors inherited from the engine's process. Refuses to know: requests,
other ranks.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from baton.adapters.digest import AdapterError
from baton.adapters.files import Adapter
from baton.api.errors import BatonError
from baton.engine_config import EngineConfig
from baton.processes.process import END_AFTER_DEATH_S, end_within
from baton.telemetry.stack_dump import dump_threads_at_signal
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.devices import device_of_rank
from engine.executors.rank_watch import STOPPED, process_state
from engine.worker.device_choice import make_current
from engine.worker.host.cores import allowed_cores, bind, cores_of_rank
from engine.worker.worker import Worker
from models.parallel.torch_group import connect

logger = logging.getLogger(__name__)

_ABORT_GRACE_S = 0.5
_LOOK_EVERY_S = 0.2
# Number of consecutive checks that must find the engine stopped. One check is not enough: after a
# stop of all processes, this process may continue before the engine does.
_MOST_LOOKS = 3


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message to a rank: the rank's number and its options."""

    model_folder: str
    config: EngineConfig
    rank: int
    meeting: str
    log_level: int
    shared: int | None = None  # descriptor of memory that all ranks share


class Step(msgspec.Struct, tag=True, frozen=True):
    """Tells a rank to compute a step after all earlier steps."""

    plan: StepPlan
    eager: bool


class Call(msgspec.Struct, tag=True, frozen=True):
    """Tells a rank to call a method of its worker and to answer with the result."""

    method: str
    args: list[Adapter | str | bool]


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Tells a rank to run ``"package.module:function"`` beside its steps; see `Executor.attach`."""

    entry: str
    argument: bytes


class Answer(msgspec.Struct, tag=True, frozen=True):
    """A rank's answer: the result of a call, or, as its first answer, that the rank has started."""

    value: Any = None


class Failure(msgspec.Struct, tag=True, frozen=True):
    """A rank's answer: the exception that a call, or the rank's start, raised."""

    kind: str
    message: str


def _from_path(value: object) -> str:
    assert isinstance(value, Path), value
    return str(value)


def _to_path(kind: type, text: str) -> Path:
    assert kind is Path, kind
    return Path(text)


ENCODER = msgspec.msgpack.Encoder(enc_hook=_from_path)
TO_RANK = msgspec.msgpack.Decoder(Start | Step | Call | Attach, dec_hook=_to_path)
FROM_RANK = msgspec.msgpack.Decoder(Answer | Failure)


def serve(
    messages: Connection,
    beside: Connection,
    until_over: Callable[[], object],
    model_folder: Path | None = None,
) -> None:
    """Serve as a rank until the engine's process is gone.

    Args:
        messages: connection to the engine's process.
        beside: connection for the attached function.
        until_over: blocks until the engine's process is gone; called on a separate thread.
        model_folder: path of the model on this machine; None: use the path in the first message.
    """
    start = TO_RANK.decode(messages.recv_bytes())
    assert isinstance(start, Start)
    logging.basicConfig(
        level=start.log_level,
        format=f"%(asctime)s %(levelname)s rank {start.rank} %(name)s: %(message)s",
    )
    done = threading.Event()
    end = until_over, done, Path(start.meeting)
    threading.Thread(target=_end_with, args=end, daemon=True).start()
    config, beside_cores = start.config, frozenset[int]()
    if config.executor_name == "multiproc" and (cores := cores_of_rank(config, start.rank)):
        beside_cores = allowed_cores()
        bind(cores)
    try:
        device = device_of_rank(config, start.rank)
        ranks = connect(
            *(start.rank, config.num_ranks, config.tensor_parallel_size, start.meeting),
            device=device,
            shared=start.shared,
            rank_sums=config.rank_sums,
        )
        worker = Worker(model_folder or Path(start.model_folder), config, device, ranks)
    except Exception as error:
        messages.send_bytes(ENCODER.encode(_failure(error)))
        raise
    messages.send_bytes(ENCODER.encode(Answer(worker.kv_memory.num_blocks)))
    try:
        while True:
            message = TO_RANK.decode(messages.recv_bytes())
            if isinstance(message, Attach):
                _attach(message, beside, worker, beside_cores)
                messages.send_bytes(ENCODER.encode(Answer()))
            else:
                _do(worker, messages, message)
    except EOFError:  # the engine's process has ended
        return
    finally:
        done.set()
        ranks.abort()


def _do(worker: Worker, messages: Connection, message: Start | Step | Call) -> None:
    if isinstance(message, Step):
        prepared = worker.runner.prepare(message.plan, eager=message.eager)
        # Replay a captured CUDA graph only for steps for which the leader replays one, too.
        worker.launch(prepared, StepHooks(after_layer=_ignore if message.eager else None))
        return
    assert isinstance(message, Call)
    answer: Answer | Failure
    try:
        answer = Answer(getattr(worker, message.method)(*message.args))
    except Exception as error:
        answer = _failure(error)
    messages.send_bytes(ENCODER.encode(answer))


def _ignore(layer: int) -> None:
    """Do nothing; a step with a hook after its layers is computed without a CUDA graph."""


def _attach(message: Attach, beside: Connection, worker: Worker, cores: frozenset[int]) -> None:
    """Run a function on a new thread; its exception ends this process, and so all ranks.

    Args:
        cores: cores of all ranks, where the thread may run, because the leader's thread may occupy
            this rank's core while another core is idle. Empty: only this rank's cores.
    """
    module, _, name = message.entry.partition(":")
    function = getattr(importlib.import_module(module), name)

    def run() -> None:
        bind(cores)
        make_current(worker.device)  # libraries use the thread's current device
        try:
            function(beside, worker.kv_memory, message.argument)
        except BaseException:
            end_within(END_AFTER_DEATH_S)  # logging may hang, as the log's reader may be gone
            logger.critical("%s cannot go on", message.entry, exc_info=True)
            os._exit(1)

    threading.Thread(target=run, name=name, daemon=True).start()


def _failure(error: Exception) -> Failure:
    if isinstance(error, AdapterError):
        return Failure(AdapterError.__name__, error.problem)
    name = type(error).__name__ if isinstance(error, BatonError) else "EngineDeadError"
    return Failure(name, str(error))


def _end_with(until_over: Callable[[], object], done: threading.Event, meeting: Path) -> None:
    """End this process when the engine's process is gone; remove the rendezvous folder."""
    until_over()
    if meeting.is_dir():
        shutil.rmtree(meeting, ignore_errors=True)
    if not done.wait(_ABORT_GRACE_S):  # give the process time to exit by itself
        os._exit(1)


def _end_if_stopped(engine_pid: int) -> None:
    """End the engine's process, and with it all ranks, if it has been stopped for a while."""
    num_looks = 0
    while num_looks < _MOST_LOOKS:
        time.sleep(_LOOK_EVERY_S)
        num_looks = num_looks + 1 if process_state(engine_pid) in STOPPED else 0
    if os.getppid() == engine_pid:
        logger.critical("the engine's process %d was stopped; all ranks end", engine_pid)
        os.kill(engine_pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        messages, life_line, beside = map(int, sys.argv[1:4])
        until_over = functools.partial(os.read, life_line, 1)
        watch = threading.Thread(target=_end_if_stopped, args=(os.getppid(),), daemon=True)
        watch.start()
        dump_threads_at_signal()
        serve(Connection(messages), Connection(beside), until_over)
    except BaseException:
        end_within(END_AFTER_DEATH_S)  # logging may hang, as the log's reader may be gone
        logger.critical("this rank cannot go on", exc_info=True)
        os._exit(1)  # exits without waiting for library threads
