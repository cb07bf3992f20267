#!/usr/bin/env bash
# Runs everything that a change must pass: every Rust test, the official SDK clients, the README's tour.
#
#   scripts/test.sh [--busy N] [--rounds N] [--suites]
#
# A line per step, and at the end what failed and the sums; scripts/run_tests.py says more.
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
for tool in curl python3; do command -v "$tool" > /dev/null || missing+=("$tool"); done
[ ${#missing[@]} = 0 ] || scripts/install.sh "${missing[@]}"
exec python3 scripts/run_tests.py "$@"
