#!/usr/bin/env bash
# Measures operators' commands and the gateway's routes on large stores: see scale --help.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
CARGO_INCREMENTAL=0 cargo build --release --locked -p threadkeep-gateway -p threadkeep-benches --bin threadkeep --bin scale
exec "$target/release/scale" "$@"
