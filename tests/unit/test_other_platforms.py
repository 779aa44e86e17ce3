"""Baton without what only Linux has: every module imports, and the reference path computes.

A process without Linux's functions, files and packages stands for macOS.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.medium, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

WITHOUT_LINUX = """
import ctypes, mmap, os, platform, resource, select, signal, socket, sys, tempfile
# Packages of others first, because they look at the platform, too.
import aiohttp, cryptography, grpc, grpc_health.v1, grpc_reflection.v1alpha, huggingface_hub
import jinja2, llguidance, msgspec, prometheus_client, rich, structlog, tokenizers, torch, typer
import gguf, matplotlib.pyplot, multiprocessing.shared_memory, safetensors.torch
import torch.distributed, uvloop, xxhash, zoneinfo

LINUX_ONLY = {
    os: '''sched_getaffinity sched_setaffinity pidfd_open memfd_create eventfd splice unshare setns
        copy_file_range posix_fadvise posix_fallocate getrandom O_TMPFILE O_PATH O_DIRECT getxattr
        sched_getscheduler sched_setscheduler sched_param fdatasync fallocate''',
    socket: '''AF_NETLINK AF_VSOCK AF_PACKET SO_PEERCRED SO_DOMAIN SO_BINDTODEVICE TCP_USER_TIMEOUT
        TCP_INFO TCP_QUICKACK TCP_DEFER_ACCEPT SOCK_CLOEXEC SOCK_NONBLOCK IP_RECVTOS
        MSG_NOSIGNAL''',
    mmap: 'MAP_POPULATE MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_DONTDUMP MADV_REMOVE',
    signal: 'pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGSTKFLT SIGRTMIN SIGRTMAX SIGPOLL',
    select: 'epoll EPOLLIN EPOLLOUT EPOLLET',
    resource: 'prlimit RLIMIT_NICE RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RUSAGE_THREAD',
}
for module, names in LINUX_ONLY.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ('mallopt', 'malloc_trim', 'prctl', 'process_vm_readv', 'sched_getcpu'):
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
tempfile._O_TMPFILE_WORKS = False  # was found when the module was imported

def refuse(event, arguments):
    if event in ('open', 'os.listdir', 'os.scandir') and arguments:
        path = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0])
        if path.startswith(('/proc', '/sys/', '/dev/shm')):
            raise FileNotFoundError(2, 'No such file or directory', path)
    if event == 'import' and arguments[0].partition('.')[0] in ('nixl', 'triton'):
        raise ModuleNotFoundError(f'No module named {arguments[0]!r}', name=arguments[0])

sys.addaudithook(refuse)
sys.platform = 'darwin'
platform.system = lambda: 'Darwin'
platform.machine = lambda: 'arm64'
"""
IMPORT_ALL = """
import importlib, pkgutil, traceback
failed = []
for package in ('baton', 'router', 'loadtest', 'engine', 'models', 'kvconnector', 'node_runtime',
                'prefill_node', 'decode_node', 'sim_node', 'baton_kernels'):
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f'{package}.'):
        name = module.name
        # These need the package that they are for: Ray, NIXL, Triton, flash-attn.
        if name.endswith('__main__') or '.triton' in name or '.nixl' in name or 'flash' in name:
            continue
        if name.endswith('library_prompts'):  # needs Triton
            continue
        try:
            importlib.import_module(name)
        except Exception:
            failed.append(f'{name}: {traceback.format_exc().strip().splitlines()[-1]}')
print(failed)
"""
GENERATE = """
import sys
from baton.api.sampling_params import SamplingParams
from engine import LLM
llm = LLM(sys.argv[1], dtype='float32', num_threads=1)
print(llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=6, temperature=0))[0].token_ids)
"""

LOOK_AROUND = """
from baton.cli.app import main
from loadtest.environment import environment
from loadtest.options import chosen_cores
from loadtest.quick.memory_speed import read_bytes_per_s
assert environment().num_cpus == len(chosen_cores('')) == os.cpu_count()
assert read_bytes_per_s(total_bytes=2**20) > 0
sys.argv = ['baton', 'doctor']
try:
    main()
except SystemExit:  # a node lacks NIXL here
    pass
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "examples" / "demo_model")],
        capture_output=True,
        text=True,
        timeout=280,
        env={"PATH": "/usr/bin:/bin", "BATON_NATIVE_KERNELS": "0", "HOME": "/nonexistent",
             "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_imports_where_linux_is_not() -> None:
    assert run(WITHOUT_LINUX + IMPORT_ALL) == "[]"


def test_the_reference_path_computes_the_same_tokens_where_linux_is_not() -> None:
    tokens = run(WITHOUT_LINUX + GENERATE)
    assert tokens.count(",") == 5
    assert tokens == run(GENERATE)


def test_doctor_and_load_test_describe_a_machine_that_is_not_linux() -> None:
    """Regression: both asked Linux for the cores of this process, and ended with a traceback."""
    assert "cores" in run(WITHOUT_LINUX + LOOK_AROUND)
