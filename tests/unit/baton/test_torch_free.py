"""The ground, the router and every `--help` work, and stay quick, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = pytest.mark.medium

PROGRAMS = ["router", "prefill", "decode", "sim-node"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_importing_the_ground_and_all_entry_points_does_not_import_torch() -> None:
    modules = ["baton", "baton.cli.app", *(f"baton.cli.programs.{p}" for p in ENTRY_POINTS)]
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'nixl') if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


ENTRY_POINTS = ["up", "router", "nodes", "sim_node", "loadtest"]


@pytest.mark.parametrize("program", [*PROGRAMS, "loadtest run"])
def test_help_is_shown_without_torch(program: str) -> None:
    code = (
        "import sys\nfrom baton.cli.app import app\n"
        f"try: app({[*program.split(), '--help']}, prog_name='baton')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = run(code)
    assert f"baton {program}" in shown
    assert "--model" in shown


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--router", "nonsense"], "--router: must be host:port"),
        (["--listen", "192.0.2.1:0"], "--listen: cannot listen on 192.0.2.1:0"),
        (["--kv-connector", "pigeon"], "unknown KV connector"),
        (["--kv-connector", "tls", "--kv-listen", "0.0.0.0:0"], "--kv-listen: peers dial"),
        (["--device", "toaster"], "--device: must be auto"),
        (["--max-model-len", "1000000"], "--max-model-len"),
    ],
)
def test_a_node_says_what_is_wrong_with_its_options_without_torch(
    options: list[str], problem: str
) -> None:
    model = str(DEMO_MODEL)
    code = (
        "import sys\nfrom baton.cli.app import app\n"
        f"try: app({['decode', '--model', model, *options]}, prog_name='baton')\n"
        "except SystemExit as end: assert end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert problem in run(code)


def test_a_client_waits_for_no_library_of_servers() -> None:
    code = (
        "import sys\nimport baton.client.client\n"
        "print([m for m in ('aiohttp', 'structlog', 'uvloop', 'typer') if m in sys.modules])"
    )
    assert run(code).strip() == "[]"
