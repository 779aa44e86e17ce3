#!/usr/bin/env bash
# Write requirements.lock: every package of a development environment, pinned, with the hashes of all
# its files, for all Python versions that the project supports. Usage: tools/lock.sh UV
set -euo pipefail
cd "$(dirname "$0")/.."
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
# Never installed by the lock, and so neither are the gigabytes of CUDA packages that it asks for.
echo 'torch; python_version < "3"' >"$overrides"
"$1" pip compile pyproject.toml tools/lock.in --extra dev --override "$overrides" --universal \
    --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --quiet \
    --custom-compile-command 'make lock' "${@:2}" --output-file requirements.lock
