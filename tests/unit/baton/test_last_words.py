"""Unit tests of the reason of a process's end: its own error, a signal, or too little memory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from baton.deployment.last_words import num_oom_kills, why_ended

INFO = "2026-11-28T10:00:00.000Z INFO engine.worker: KV cache of 64 MiB"
TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
    bytearray(10**15)"""


@pytest.mark.parametrize(
    ("code", "lines", "ran_out", "said"),
    [
        (1, [INFO, "error: listen: cannot listen on a:1"], False, "listen: cannot listen on a:1"),
        (1, [INFO, TRACEBACK, "MemoryError"], False, "out of memory (MemoryError)"),
        (1, [TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory."], False,
         "out of memory (torch.OutOfMemoryError: CUDA out of memory.)"),
        (1, [TRACEBACK, "ValueError: no"], False, "ValueError: no"),
        (-6, ["terminate called after throwing an instance of 'std::bad_alloc'"], False,
         "out of memory (terminate called after throwing an instance of 'std::bad_alloc')"),
        (-9, [INFO], True, "out of memory: the kernel killed it (SIGKILL)"),
        (-9, [INFO], False,
         "was killed (SIGKILL): by somebody, or by the kernel as memory ran out"),
        (-9, [], False, "was killed (SIGKILL): by somebody, or by the kernel as memory ran out"),
        (-11, [INFO], False, "crashed (SIGSEGV)"),
        (-7, [INFO], False,
         "crashed (SIGBUS): a file that it had mapped was cut off, or /dev/shm is full"),
        (-4, [INFO], False,
         "crashed (SIGILL): a library has instructions that this CPU does not have"),
        (-15, [INFO], False, "was told to end (SIGTERM)"),
        (-40, [INFO], False, "was ended by signal 40"),
        (3, [INFO], False, "ended with exit code 3 and named no error"),
        (0, [INFO], False, "ended with exit code 0 and named no error"),
    ],
)  # fmt: skip
def test_an_end_is_told_in_words_and_no_other_line_is_quoted(
    tmp_path: Path, code: int, lines: list[str], ran_out: bool, said: str
) -> None:
    """Regression: "exit code -9; it printed nothing", or whatever line the log had last."""
    log = tmp_path / "d0.log"
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert why_ended(code, log, ran_out=ran_out) == f"{said}; log: {log}"


def test_what_an_earlier_process_wrote_is_not_this_ones_error(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    log.write_text("error: of the process before\n", encoding="utf-8")
    start = log.stat().st_size
    assert why_ended(-11, log, start) == f"crashed (SIGSEGV); log: {log}"


def test_a_log_that_is_gone_is_told(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    said = why_ended(-signal.SIGSEGV, log)
    assert said == f"crashed (SIGSEGV); its log {log} cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("group", "file", "text"),
    [
        ("0::/pod/a", "pod/a/memory.events", "low 0\noom 9\noom_kill 2\noom_group_kill 1\n"),
        ("5:cpu,memory:/a", "memory/a/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n"),
    ],
)
def test_the_kernels_kills_are_counted(tmp_path: Path, group: str, file: str, text: str) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    assert num_oom_kills(proc, groups) == 0
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n", encoding="utf-8")
    (proc / "self" / "cgroup").write_text(f"{group}\n", encoding="utf-8")
    assert num_oom_kills(proc, groups) == 7  # of the machine: its group counts none
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text(text, encoding="utf-8")
    assert num_oom_kills(proc, groups) == 2


def test_this_machine_can_be_asked() -> None:
    assert num_oom_kills() >= 0
