"""Writes deploy/kustomize/base: the manifests that the Helm chart makes by default.

python -m tools.kustomize_base
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELM = ROOT / ".venv-deploy" / "bin" / "helm"
BASE = ROOT / "deploy" / "kustomize" / "base"
_HEAD = "# Written by tools/kustomize_base.py, of the defaults of deploy/helm/baton.\n"
_KUSTOMIZATION = f"""{_HEAD}apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - baton.yaml
"""


def main() -> None:
    """Write the chart's output, and the kustomization.yaml that lists it."""
    chart = str(ROOT / "deploy/helm/baton")
    command = [str(HELM), "template", "baton", chart, "--namespace", "baton"]
    text = subprocess.check_output(command, text=True)
    BASE.mkdir(parents=True, exist_ok=True)
    (BASE / "baton.yaml").write_text(_HEAD + text)
    (BASE / "kustomization.yaml").write_text(_KUSTOMIZATION)


if __name__ == "__main__":
    main()
