#!/bin/sh
# Install Prometheus and promtool, which tests of rules and dashboards start (Debian, Ubuntu).
set -eu
command -v promtool >/dev/null && exit 0
if [ "$(id -u)" -eq 0 ]; then sudo=; else sudo="sudo --non-interactive"; fi
$sudo apt-get update --quiet
$sudo apt-get install --yes --quiet --no-install-recommends prometheus
