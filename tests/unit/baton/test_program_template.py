"""ProgramTemplate forks programs with their own arguments, environment, output and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from baton.deployment.local_deployment import NODE_LOAD, NODE_MODULES
from baton.processes.child_processes import THREAD_VARIABLES
from baton.processes.program_template import ForkedProgram, ProgramTemplate, TemplateError

PROGRAM = """
import os, sys, time

loaded = []

def load(*words):
    loaded.extend([os.getpid(), *words])

def main():
    if sys.argv[1] == "loaded":
        print(loaded[0] == os.getppid(), loaded[1:], flush=True)
        sys.exit()
    print(sys.argv, os.environ.get("TOLD"), os.getsid(0) == os.getpid(), flush=True)
    if sys.argv[1] == "wait":
        time.sleep(60)
    sys.exit(int(sys.argv[1]))
"""
THREADED = """
import threading, time

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
Start = Callable[[Sequence[str]], ForkedProgram]
DEMO_MODEL = Path(__file__).parents[3] / "examples" / "demo_model"


@pytest.fixture
def make_template(tmp_path: Path) -> Iterator[Callable[..., ProgramTemplate]]:
    """Make templates of PROGRAM, with more modules beside it."""
    (tmp_path / "told.py").write_text(PROGRAM)
    (tmp_path / "threaded.py").write_text(THREADED)
    templates: list[ProgramTemplate] = []

    def make(*modules: str, load: Sequence[str] = ()) -> ProgramTemplate:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        templates.append(ProgramTemplate("told:main", ("told", *modules), environment, load=load))
        return templates[-1]

    yield make
    for template in templates:
        template.close()


@pytest.fixture
def template(make_template: Callable[..., ProgramTemplate]) -> ProgramTemplate:
    return make_template()


@pytest.fixture
def start(template: ProgramTemplate, tmp_path: Path) -> Iterator[Start]:
    """Start programs whose output goes to `log`."""
    programs: list[ForkedProgram] = []

    def start_one(arguments: Sequence[str]) -> ForkedProgram:
        with (tmp_path / "log").open("ab") as log:
            programs.append(template.start(arguments, {"TOLD": "yes"}, log.fileno()))
        return programs[-1]

    yield start_one
    for program in programs:
        program.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_program_has_its_own_arguments_environment_output_and_session(
    start: Start, tmp_path: Path
) -> None:
    program = start(["7", "two words"])
    assert program.wait() == 7
    assert (tmp_path / "log").read_text() == "['baton', '7', 'two words'] yes True\n"
    assert program.poll() == program.returncode == 7


def test_ps_shows_a_programs_arguments(start: Start, tmp_path: Path) -> None:
    program = start(["wait", "--name", "d0"])
    wait_for(lambda: bool((tmp_path / "log").read_text()))
    shown = Path(f"/proc/{program.pid}/cmdline").read_bytes()
    assert shown.rstrip(b"\0") == f"{sys.executable} -P -m baton wait --name d0".encode()


def test_programs_end_each_in_its_own_way(start: Start) -> None:
    killed, stopped, ended = start(["wait"]), start(["wait"]), start(["3"])
    assert ended.wait() == 3
    assert killed.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.01)
    killed.kill()
    stopped.send_signal(signal.SIGTERM)
    assert (killed.wait(30), stopped.wait(30)) == (-signal.SIGKILL, -signal.SIGTERM)
    killed.kill()  # an ended program takes no signals


@pytest.mark.parametrize("is_killed", [True, False])
def test_programs_go_on_without_their_template(
    is_killed: bool, start: Start, template: ProgramTemplate
) -> None:
    program = start(["wait"])
    if is_killed:
        psutil.Process(psutil.Process(program.pid).ppid()).kill()
    else:
        template.close()
    assert program.poll() is None
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait(30) == -signal.SIGKILL, "nobody knows the exit code"
    with pytest.raises(TemplateError):
        start(["0"])


def anonymous_bytes(process: psutil.Process) -> int:
    """Return a process's memory without pages of files, whose number depends on the kernel."""
    memory = process.memory_info()
    return memory.rss - memory.shared


def test_a_template_that_released_its_memory_still_reports_ends(
    start: Start, template: ProgramTemplate
) -> None:
    ended_before, ended, killed = start(["3"]), start(["wait"]), start(["wait"])
    process = psutil.Process(psutil.Process(killed.pid).ppid())
    before = anonymous_bytes(process)
    template.release_memory()
    template.release_memory()  # a second time changes nothing
    wait_for(lambda: "program_reaper.py" in " ".join(process.cmdline()))
    wait_for(lambda: anonymous_bytes(process) < before * 0.7)
    with pytest.raises(TemplateError):
        start(["0"])
    assert killed.poll() is None
    killed.kill()
    ended.send_signal(signal.SIGTERM)
    assert (ended_before.wait(30), killed.wait(30)) == (3, -signal.SIGKILL)
    assert ended.wait(30) == -signal.SIGTERM
    template.close()
    assert not process.is_running()


def test_what_a_template_loads_is_there_in_each_program(
    make_template: Callable[..., ProgramTemplate], tmp_path: Path
) -> None:
    template = make_template(load=("told:load", "a model"))
    for _ in range(2):
        with (tmp_path / "log").open("ab") as log:
            assert template.start(["loaded"], {}, log.fileno()).wait() == 0
    assert (tmp_path / "log").read_text() == 2 * "True ['a model']\n"


@pytest.mark.parametrize("module", ["threaded", "missing"])
def test_a_template_that_cannot_fork_says_so(
    module: str, make_template: Callable[..., ProgramTemplate]
) -> None:
    with pytest.raises(TemplateError):
        make_template(module).start(["0"], {}, 2)


def test_what_nodes_share_starts_no_thread() -> None:
    program = (
        "import importlib, os, sys\n"
        "for name in sys.argv[3:]: importlib.import_module(name)\n"
        "module, _, function = sys.argv[1].partition(':')\n"
        "getattr(importlib.import_module(module), function)(sys.argv[2])\n"
        "assert sys.modules[module]._load.cache_info().currsize == 1\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = {**THREAD_VARIABLES, **os.environ, "OMP_NUM_THREADS": "2"}
    words = [sys.executable, "-c", program, NODE_LOAD, str(DEMO_MODEL), *NODE_MODULES]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
