"""Writes the folders of deploy/kustomize: manifests of the chart, with and without encode nodes.

python -m tools.kustomize_base
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HELM = ROOT / ".venv-deploy" / "bin" / "helm"
# The chart's values of each folder.
BASES: dict[str, dict[str, Any]] = {"base": {}, "base-with-encode": {"encode": {"replicas": 1}}}
_HEAD = "# Written by tools/kustomize_base.py, of the defaults of deploy/helm/baton{values}.\n"
_KUSTOMIZATION = """apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - baton.yaml
"""


def main() -> None:
    """Write the chart's output, and the kustomization.yaml that lists it, for each folder."""
    chart = str(ROOT / "deploy/helm/baton")
    for name, values in BASES.items():
        given = json.dumps(values)
        command = [str(HELM), "template", "baton", chart, "--namespace", "baton", "--values", "-"]
        text = subprocess.check_output(command, input=given, text=True)
        head = _HEAD.format(values=f" and {given}" if values else "")
        folder = ROOT / "deploy" / "kustomize" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "baton.yaml").write_text(head + text)
        (folder / "kustomization.yaml").write_text(head + _KUSTOMIZATION)


if __name__ == "__main__":
    main()
