#!/usr/bin/env bash
# Write requirements.lock (and those of the images, deploy/docker): every package of a development environment, pinned, with the hashes of all
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

# What the images hold (deploy/docker): the same releases, without what only development needs.
images=deploy/docker
for image in router node; do
    more=()
    [ "$image" = router ] || more=("$images/$image.in" --extra images --extra s3)  # these include the extra `node`
    "$1" pip compile pyproject.toml "${more[@]}" --override "$overrides" --universal \
        --constraint requirements.lock --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-header --quiet --no-annotate --custom-compile-command 'make lock' \
        --output-file "$images/$image.lock"
done
"$1" pip compile "$images/build.in" --universal --constraint requirements.lock --python-version 3.11 \
    --generate-hashes --no-emit-index-url --no-header --quiet --no-annotate \
    --custom-compile-command 'make lock' "${@:2}" --output-file "$images/build.lock"
