#!/bin/sh
# Install the model checker that `make protocol-check` needs (Debian, Ubuntu).
set -eu
command -v spin >/dev/null && command -v gcc >/dev/null && exit 0
if [ "$(id -u)" -eq 0 ]; then sudo=; else sudo=sudo; fi
$sudo apt-get update --quiet
$sudo apt-get install --yes --quiet spin gcc
