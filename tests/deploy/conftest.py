"""Tools that check deploy/ without a cluster: `make deploy-check` puts them into .venv-deploy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-deploy" / "bin"
CHART = ROOT / "deploy" / "helm" / "baton"
KUBERNETES_VERSIONS = ("1.34.0", "1.35.0", "1.36.0", "1.37.0")

Document = dict[str, Any]

_VALIDATE = """
import json, sys
import kubernetes_validate
problems = []
for document in json.load(sys.stdin):
    name = document["kind"] + " " + document["metadata"]["name"]
    for version in sys.argv[1:]:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{name} in {version}: {error.message} at {list(error.path)}")
print(json.dumps(problems))
"""


def tool(name: str) -> str:
    """Where a tool is; skips a test where it was not fetched."""
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"{name} is not in .venv-deploy: make deploy-check")
    return str(path)


def run(*command: str, given: str = "", code: int = 0) -> str:
    """Run a command that must exit with ``code``; return what it prints."""
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == code, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def render(values: Document, *, release: str = "baton", namespace: str = "baton") -> list[Document]:
    """The objects that the chart makes of values."""
    text = run(
        tool("helm"), "template", release, str(CHART), "--namespace", namespace, "--values", "-",
        given=json.dumps(values),
    )  # fmt: skip
    return [document for document in yaml.safe_load_all(text) if document]


def problems_of(documents: list[Document]) -> list[str]:
    """Check objects of built-in kinds with four Kubernetes versions' strict schemas."""
    own = [one for one in documents if _is_of_kubernetes(one)]
    text = run(tool("python"), "-c", _VALIDATE, *KUBERNETES_VERSIONS, given=json.dumps(own))
    found: list[str] = json.loads(text.splitlines()[-1])
    return found


def _is_of_kubernetes(document: Document) -> bool:
    group = document["apiVersion"].rpartition("/")[0]
    return not group or "." not in group or group.endswith(".k8s.io")
