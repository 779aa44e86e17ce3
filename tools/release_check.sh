#!/usr/bin/env bash
# Check what a release needs, and leave its distributions in dist/. `make release-check` runs this
# after `make check`. Usage: tools/release_check.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
version=$("$python" -c 'import runpy; print(runpy.run_path("baton/version.py")["__version__"])')

if ! git diff --quiet HEAD; then
    echo "release-check: commit the changed files first: $(git diff --name-only HEAD | head -3 | tr '\n' ' ')" >&2
    exit 1
fi
if ! grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md; then
    echo "release-check: CHANGELOG.md needs a line '## [$version] - YYYY-MM-DD'" >&2
    exit 1
fi
unreleased=$(sed -n '/^## \[Unreleased\]/,/^## \[[0-9]/p' CHANGELOG.md | grep -vE '^(## .*)?$' || true)
if [ -n "$unreleased" ]; then
    echo "release-check: CHANGELOG.md has lines under Unreleased: move them to [$version]" >&2
    exit 1
fi
tagged=$(git rev-parse --quiet --verify "v$version^{commit}" || true)
if [ -n "$tagged" ] && [ "$tagged" != "$(git rev-parse HEAD)" ]; then
    echo "release-check: v$version is the tag of another commit: raise baton/version.py" >&2
    exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet 'build>=1.2' 'twine>=6' hatchling 'auditwheel>=6.2'
rm -f dist/baton_serve-*
"$work/tools/bin/python" -m build --sdist --outdir dist .
"$python" -m tools.build_wheels "$work/tools/bin" dist
BATON_TEST_LIBRARIES="build/wheel_libraries/$(uname -m)" "$python" -m pytest -q -m large \
    tests/integration/test_native_build.py -k computes_the_tokens
"$work/tools/bin/twine" check --strict dist/baton_serve-"$version"*
# The wheel alone, as a user of the router and the client installs it: without torch.
"$python" -m venv "$work/fresh"
"$work/fresh/bin/pip" install --quiet --find-links dist "baton-serve==$version"
"$work/fresh/bin/pip" check
told="$("$work/fresh/bin/baton" version) $("$work/fresh/bin/baton" --version)"
case "$told" in
    "$version $version") echo "release-check: $(ls dist/baton_serve-* | tr '\n' ' ') and the wheel says: $told" ;;
    *) echo "release-check: the installed wheel says '$told', not $version" >&2; exit 1 ;;
esac
