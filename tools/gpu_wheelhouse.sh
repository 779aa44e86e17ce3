#!/usr/bin/env bash
# What the GPU suite needs beside torch, triton and numpy, for a machine without a package registry
# (Python 3.12, Linux x86-64): wheels in build/wheels, which git ignores; with the sources 62 MiB at
# most.
#
#   tools/gpu_wheelhouse.sh [PYTHON]              here: download, in the versions that PYTHON has
#   WITHOUT="grpcio rich" tools/gpu_wheelhouse.sh   but for what that machine has already
#   tools/gpu_wheelhouse.sh --peers [PYTHON]      with FlashInfer in NIXL's place: both are too much
#   tools/gpu_wheelhouse.sh --unpack [PYTHON]     there: unpack into build/gpu_site, then
#   PYTHONPATH=build/gpu_site python3 -m benchmarks gpu_suite
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=build/wheels
site=build/gpu_site
both_mib=62  # of wheels and sources

if [ "${1:-}" = --unpack ]; then
    python=${2:-python3}
    mkdir -p "$site"
    for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
    PYTHONPATH=$site:.:kernels exec "$python" -c "
import importlib
for name in ('engine', 'baton.cli.app', 'nixl', 'pytest', 'pytest_timeout', 'flashinfer',
             'flash_attn_interface'):
    try:
        importlib.import_module(name)
        print(f'{name}: imported')
    except Exception as error:
        print(f'{name}: {type(error).__name__}: {error}')
"
fi

with_peers=
if [ "${1:-}" = --peers ]; then with_peers=1; shift; fi
python=${1:-.venv/bin/python}
engine="msgspec xxhash structlog llguidance jinja2 markupsafe tokenizers safetensors huggingface-hub
    rich markdown-it-py mdurl pygments"
nodes="grpcio protobuf googleapis-common-protos grpcio-health-checking grpcio-reflection
    cryptography cffi pycparser
    prometheus-client typer click shellingham annotated-doc typing-extensions packaging
    pydantic pydantic-core annotated-types typing-inspection
    aiohttp aiosignal aiohappyeyeballs attrs frozenlist multidict propcache yarl idna uvloop"
tests="pytest pluggy iniconfig pytest-timeout pytest-xdist execnet hypothesis sortedcontainers"
nixl="nixl nixl-cu13"
# To compare attention with; FlashInfer compiles its kernels there, with nvcc and ninja. Its newer
# wheels are 62 MB. FlashAttention 3 has no release: lay a wheel that was built elsewhere in
# build/wheels, and it is unpacked like the others.
peers="flashinfer-python<0.6.4 apache-tvm-ffi<0.2 ninja einops filelock requests
    charset-normalizer urllib3 certifi tabulate tqdm nvidia-ml-py"

platforms=()
for glibc in 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done

download() {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 312 --implementation cp --abi cp312 --abi abi3 --abi none \
        "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$wheels" "$1" 2> /dev/null
}

mkdir -p "$wheels"
if [ "$with_peers" ]; then
    rm -f "$wheels"/nixl*.whl
    extra=$peers
else
    extra=$nixl
fi
for name in $engine $nodes $tests $extra; do
    case " ${WITHOUT:-} " in *" $name "*) continue ;; esac
    version=$("$python" -c "
import importlib.metadata, sys
try:
    print('==' + importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    pass" "$name")
    download "$name$version" || download "$name" || echo "no wheel: $name$version" >&2
done

# NIXL's wheel brings parts that nothing here uses: expert parallelism for three releases of torch,
# plugins for storage and their libraries. UCX and what it is linked with stay.
[ "$with_peers" ] || "$python" - "$wheels"/nixl_cu13-*.whl <<'PYTHON'
import re, sys, zipfile
from pathlib import Path

unused = re.compile(
    r"^nixl_ep_cu13/|^nixl_cu13.scripts/|/libucx_perftest|/libplugin_(?!UCX)"
    r"|/lib(aws|azure|xml2|curl|s2n|gusli)"
)
path = Path(sys.argv[1])
smaller = path.with_suffix(".smaller")
with zipfile.ZipFile(path) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
    for entry in old.infolist():
        if not unused.search(entry.filename):
            new.writestr(entry, old.read(entry))
smaller.replace(path)
PYTHON

mib=$(du -sm "$wheels" | cut -f1)
echo "$(ls "$wheels" | wc -l) wheels, $mib MiB in $wheels"
sources_mib=$(git ls-files -z | du -cm --apparent-size --files0-from=- | tail -1 | cut -f1)
most_mib=$((both_mib - sources_mib))
if [ "$mib" -gt "$most_mib" ]; then
    echo "error: $wheels: at most $most_mib MiB can be carried beside $sources_mib MiB of sources," \
        "got $mib; name what the machine has in WITHOUT" >&2
    exit 1
fi
