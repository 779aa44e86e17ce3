#!/usr/bin/env bash
# Generate baton/v1 from proto/. With --check: fail if the committed stubs are not what comes out.
set -euo pipefail
python=$1
cd "$(dirname "$0")/.."
[[ $python = /* ]] || python=$PWD/$python
out=.
if [[ ${2:-} == --check ]]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
"$python" -m grpc_tools.protoc -I proto \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" proto/baton/v1/*.proto
if [[ $out != . ]]; then
    diff --recursive --exclude __init__.py --exclude __pycache__ "$out/baton/v1" baton/v1 \
        || { echo "baton/v1 is stale: run 'make proto'" >&2; exit 1; }
    echo "baton/v1 is fresh"
fi
