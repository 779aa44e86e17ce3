#!/bin/sh
# Install the browser that the test of the load test's HTML page opens (Debian, Ubuntu).
set -eu
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" -eq 0 ]; then sudo=; else sudo="sudo --non-interactive"; fi
$sudo apt-get update --quiet
$sudo apt-get install --yes --quiet chromium
