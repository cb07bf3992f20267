#!/usr/bin/env bash
# The session of docs/operating.md: two threads of 2,000 turns with side branches, one in each mode.
#   scripts/operating.sh [turns]
set -euo pipefail
cd "$(dirname "$0")/.."
turns=${1:-2000}
cargo build --release --locked -q -p threadkeep-gateway --bins --example long_threads
target=${CARGO_TARGET_DIR:-target}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
database=$dir/checkpoints.db
"$target/release/examples/long_threads" "$database" "$turns"

threadkeep() {
  printf '\n$ threadkeep %s\n' "$*"
  local started=$SECONDS
  "$target/release/threadkeep" "$@" --sqlite "$database" | sed "s|$dir/||g"
  printf '# %s s\n' "$((SECONDS - started))"
}

threadkeep threads du
threadkeep prune plan --thread long-delta --keep last:100 --boundary fresh-snapshot --summary
threadkeep prune apply --all --keep last:100 --boundary fresh-snapshot --yes
threadkeep vacuum
threadkeep verify --all
threadkeep convert --all --to full
threadkeep verify --all
