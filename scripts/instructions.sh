#!/usr/bin/env bash
# Counts the instructions of the hot paths and compares them with benches/instructions.json; --update rewrites that
# file.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v valgrind > /dev/null; then
  scripts/install.sh valgrind
fi
# Incremental builds generate different code.
CARGO_INCREMENTAL=0 cargo build --release --locked -p threadkeep-benches --no-default-features --bin instructions
exec "${CARGO_TARGET_DIR:-target}/release/instructions" "$@"
