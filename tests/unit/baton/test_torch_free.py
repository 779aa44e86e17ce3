"""The ground, the router and every `--help` work, and stay quick, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.medium

PROGRAMS = ["router", "prefill", "decode", "sim-node"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
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


def test_a_client_waits_for_no_library_of_servers() -> None:
    code = (
        "import sys\nimport baton.client.client\n"
        "print([m for m in ('aiohttp', 'structlog', 'uvloop', 'typer') if m in sys.modules])"
    )
    assert run(code).strip() == "[]"
