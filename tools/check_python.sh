#!/usr/bin/env bash
# One clear line when the Python that would make .venv is too old.
set -euo pipefail
"$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "Baton needs Python 3.11 or newer; '$1' is $("$1" --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
