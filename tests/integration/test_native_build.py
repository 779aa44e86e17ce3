"""Building the C library in processes of their own: at once, from the cache, and where it fails."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from baton.kernel_library import ahead, build
from baton.kernel_library.state import BUILDING, SLOWER
from baton.processes.free_address import free_address
from baton_kernels.dispatch import native_ops

# A build takes ten times as long on a machine that does much else.
pytestmark = [pytest.mark.large, pytest.mark.timeout(400)]
BUILD_TIMEOUT_S = 300

ROOT = Path(__file__).resolve().parents[2]
GENERATE = """
import logging, sys
logging.basicConfig(level="WARNING", format="%(message)s")
from baton.api.sampling_params import SamplingParams
from engine import LLM
llm = LLM(sys.argv[1], dtype="float32", num_threads=1, weights=sys.argv[2])
print(llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=6, temperature=0))[0].token_ids)
"""
LOAD = """
import os
if "WITHOUT_HOME" in os.environ:
    del os.environ["HOME"]
    os.getuid = lambda: 2**30  # a user whom nothing on this machine knows, as containers have
from baton_kernels.dispatch import native_ops
print(native_ops() is not None)
"""
PANEL = """
from baton_kernels.dispatch import native_ops
print(native_ops().panel_width)
"""
needs_compiler = pytest.mark.skipif(native_ops() is None, reason="no native kernels here")


@pytest.fixture(scope="module")
def quick_cc(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that optimizes nothing, in a third of the time: how fast the code is, is not what
    is tested where it is built again and again."""
    script = tmp_path_factory.mktemp("bin") / "cc"
    script.write_text(
        '#!/bin/sh\nfor word; do shift; [ "$word" = -O3 ] && word=-O0; set -- "$@" "$word"; done\n'
        f'exec {shutil.which("cc")} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=BUILD_TIMEOUT_S)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


@pytest.mark.parametrize("weights", ["auto", "int8-weight-only", "int8", "int4"])
def test_without_a_compiler_torch_computes_and_one_line_says_so(
    tmp_path: Path, weights: str
) -> None:
    """Formats of weights mean the same with and without C, so the tokens are the same."""
    model = str(ROOT / "examples" / "demo_model")
    without = start(GENERATE, model, weights, BATON_CACHE=str(tmp_path), CC="/nonexistent")
    tokens, log = finish(without)
    reason = "no C compiler (CC=/nonexistent)"
    assert log == f"no native kernels, torch computes instead ({SLOWER}): {reason}"
    assert tokens == finish(start(GENERATE, model, weights))[0]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CC": "/bin/false"}, "/bin/false: exit status 1"),
        ({"PATH": ""}, "no C compiler (cc, gcc, clang)"),
    ],
)
def test_the_log_says_why_there_is_no_library(
    tmp_path: Path, environment: Mapping[str, str], reason: str
) -> None:
    out, log = finish(start(LOAD, **{"BATON_CACHE": str(tmp_path), **environment}))
    assert (out, log.endswith(reason), len(log.splitlines())) == ("False", True, 1)


@pytest.mark.skipif(shutil.which("clang") is None, reason="no clang here")
def test_clang_is_refused_because_its_threads_need_another_runtime(tmp_path: Path) -> None:
    out, log = finish(start(LOAD, BATON_CACHE=str(tmp_path), CC="clang"))
    assert out == "False"
    assert "clang calls other functions for threads than GCC; install gcc" in log


@needs_compiler
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"BATON_CACHE": "FILE"}, "FILE/native: File exists"),
        ({"BATON_CACHE": "", "WITHOUT_HOME": "1"}, "a folder where there is no home, got none"),
    ],
)
def test_where_there_is_no_cache_kernels_are_kept_with_temporary_files(
    tmp_path: Path, quick_cc: str, environment: Mapping[str, str], reason: str
) -> None:
    """Regression: a read-only home or none cost the kernels, and one line in a log said so."""
    (tmp_path / "file").write_text("")
    file = str(tmp_path / "file")
    named = {name: text.replace("FILE", file) for name, text in environment.items()}
    for _ in range(2):  # the second one builds nothing
        out, log = finish(start(LOAD, CC=quick_cc, TMPDIR=str(tmp_path), **named))
        assert out == "True"
        [line] = log.splitlines()
        assert line.startswith(f"native kernels are kept in {tmp_path}/baton-native-")
        assert line.endswith(reason.replace("FILE", file))
    [folder] = tmp_path.glob("baton-native-*")
    assert len(list(folder.iterdir())) == 1


def up(model: str, *options: str, **environment: str) -> tuple[int, str, str]:
    """Run `baton up` to its end; return its exit code, output and errors."""
    process = start(
        "from baton.cli.app import main; main()", "up", "--model", model,
        "--listen", free_address(), "--http-listen", free_address(), *options, **environment,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=BUILD_TIMEOUT_S)
        return process.returncode, out, errors
    finally:
        process.kill()
        process.communicate()


@needs_compiler
def test_up_builds_once_before_it_starts_nodes_and_says_so(tmp_path: Path, quick_cc: str) -> None:
    """Before, both nodes compiled, and nothing on the screen said why they did not get ready."""
    compilers = tmp_path / "compilers"
    counting = tmp_path / "cc"
    counting.write_text(f'#!/bin/sh\necho "$*" >> {compilers}\nexec {quick_cc} "$@"\n')
    counting.chmod(0o755)
    environment = {"BATON_CACHE": str(tmp_path / "cache"), "CC": str(counting)}
    code, _, errors = up("no/such/model", **environment)
    assert (code, "there is no such folder or file" in errors) == (1, True), errors
    assert not (tmp_path / "cache").exists()  # a model that is none costs no build
    model = str(ROOT / "examples" / "demo_model")
    code, out, errors = up(model, "--node-args", "--kv-cache-memory 1K", **environment)
    assert (code, " ended: " in errors) == (1, True), errors  # a start that fails
    assert BUILDING in " ".join(out.split())
    [library] = (tmp_path / "cache" / "native").iterdir()  # is kept all the same
    built = [line for line in compilers.read_text().splitlines() if "-shared" in line.split()]
    assert len(built) == 1, library


@needs_compiler
def test_compilers_of_an_up_that_is_killed_end_with_it(tmp_path: Path) -> None:
    """Regression: five orphaned compilers went on burning."""
    killed = start(
        "from baton.cli.app import main; main()", "up",
        "--model", str(ROOT / "examples" / "demo_model"), "--listen", free_address(),
        "--http-listen", free_address(), BATON_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    try:
        compilers: list[psutil.Process] = []
        give_up_at = time.monotonic() + 60
        while len(compilers) < 3:  # the guard, a compiler's driver, and its child
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
            compilers = psutil.Process(killed.pid).children(recursive=True)
    finally:
        killed.kill()
        killed.communicate()
    _, alive = psutil.wait_procs(compilers, timeout=20)
    running = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not running, [one.cmdline() for one in running]


@needs_compiler
def test_processes_may_build_at_once_and_the_next_one_does_not_build(
    tmp_path: Path, quick_cc: str
) -> None:
    processes = [start(LOAD, BATON_CACHE=str(tmp_path), CC=quick_cc) for _ in range(3)]
    assert [finish(process)[0] for process in processes] == ["True"] * 3
    (library,) = (tmp_path / "native").iterdir()  # one file, and no build folder left behind
    built = library.stat().st_mtime_ns
    assert finish(start(LOAD, BATON_CACHE=str(tmp_path), CC=quick_cc))[0] == "True"
    assert library.stat().st_mtime_ns == built


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86")
@pytest.mark.parametrize(("level", "lanes"), [("x86-64", 4), ("x86-64-v3", 8)])
def test_cc_chooses_the_instruction_set_and_each_has_a_library_of_its_own(
    tmp_path: Path, quick_cc: str, level: str, lanes: int
) -> None:
    for more, found in ((f"-march={level}", 2 * lanes), ("-march=x86-64", 8)):
        compiler = f"{quick_cc} {more}"
        out, _ = finish(start(PANEL, BATON_CACHE=str(tmp_path), CC=compiler))
        assert int(out) == found
    assert len(list((tmp_path / "native").iterdir())) == (1 if level == "x86-64" else 2)


def test_the_key_of_a_library_tells_cpus_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that two machines share: code for the one is an illegal instruction on the other."""
    keys = set()
    for flags in ("flags : avx512f", "flags : avx2"):
        monkeypatch.setattr(build, "_cpu_flags", lambda flags=flags: flags)
        keys.add(build._key([], ["true"], ["-O3"]))
    assert len(keys) == 2


def test_the_environment_can_forbid_native_kernels() -> None:
    assert finish(start(LOAD, BATON_NATIVE_KERNELS="0")) == ("False", "")


@needs_compiler
def test_what_was_built_ahead_is_loaded_where_there_is_no_compiler(
    quick_cc: str, tmp_path: Path
) -> None:
    libraries = tmp_path / "libraries"
    building = (
        "from pathlib import Path; from baton.kernel_library import ahead; "
        f"ahead.build_libraries(Path({str(libraries)!r}), ahead.INSTRUCTION_SETS[-4:])"
    )
    built = start(building, CC=quick_cc)
    assert built.communicate(timeout=BUILD_TIMEOUT_S)[1] == ""
    environment = {
        "CC": "no-compiler",
        "BATON_CACHE": str(tmp_path / "cache"),
        "BATON_NATIVE_LIBRARIES": str(libraries),
    }
    generated = start(GENERATE, str(ROOT / "examples" / "demo_model"), "fp32", **environment)
    printed, errors = generated.communicate(timeout=100)
    assert (generated.returncode, errors) == (0, ""), errors
    assert printed.count(",") == 5
    assert not (tmp_path / "cache" / "native").exists()


HERE = [one for one in ahead.INSTRUCTION_SETS if one.machine == platform.machine()]


@pytest.fixture(scope="module")
def compiler(quick_cc: str) -> str:
    """The compiler of the libraries that were built ahead."""
    return "cc" if "BATON_TEST_LIBRARIES" in os.environ else quick_cc


@pytest.fixture(scope="module")
def built_ahead(quick_cc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of libraries for all instruction sets of this machine type.

    `BATON_TEST_LIBRARIES` names the folder of a wheel's libraries; else they are built here.
    """
    if named := os.environ.get("BATON_TEST_LIBRARIES"):
        return Path(named).absolute()
    folder = tmp_path_factory.mktemp("libraries")
    building = (
        "from pathlib import Path; from baton.kernel_library import ahead; "
        f"ahead.build_libraries(Path({str(folder)!r}))"
    )
    assert start(building, CC=quick_cc).communicate(timeout=BUILD_TIMEOUT_S)[1] == ""
    return folder


@needs_compiler
@pytest.mark.parametrize("one", HERE, ids=lambda one: one.name)
def test_each_library_built_ahead_is_bit_for_bit_the_one_that_is_built_here(
    built_ahead: Path, compiler: str, tmp_path: Path, one: ahead.InstructionSet
) -> None:
    """Equal machine code computes equal bits."""
    building = "from baton.kernel_library.build import open_library; open_library()"
    finish(start(building, BATON_CACHE=str(tmp_path), CC=" ".join((compiler, *one.flags))))
    (here,) = (tmp_path / "native").iterdir()
    assert here.read_bytes() == (built_ahead / f"{one.name}.so").read_bytes()


@needs_compiler
@pytest.mark.parametrize("one", HERE, ids=lambda one: one.name)
def test_each_library_that_this_cpu_can_run_computes_the_tokens(
    built_ahead: Path, tmp_path: Path, one: ahead.InstructionSet
) -> None:
    """The log names the library; a CPU that lacks something says so."""
    environment = {
        "CC": "no-compiler",
        "BATON_CACHE": str(tmp_path),
        "BATON_NATIVE_LIBRARIES": str(built_ahead),
        "BATON_NATIVE_KERNELS": one.name,
    }
    model = str(ROOT / "examples" / "demo_model")
    generate = GENERATE.replace('level="WARNING"', 'level="INFO"')
    tokens, log = finish(start(generate, model, "fp32", **environment))
    if ahead.cpu_features().issuperset(one.needs):
        assert f"native kernels: built ahead for {one.name}" in log
    else:
        assert f"no library {one.name} for this CPU" in log
    without = {"BATON_NATIVE_KERNELS": "0", "BATON_CACHE": str(tmp_path)}
    assert tokens == finish(start(GENERATE, model, "fp32", **without))[0]
