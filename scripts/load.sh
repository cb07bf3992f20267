#!/usr/bin/env bash
# Measures the gateway under load, and LangGraph's development server under the same. That is installed into a private Python
# environment in target/bench; where it cannot be, the gateway is measured alone.
#
#   scripts/load.sh [--turns 100 ...]     see load --help
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/bench"
CARGO_INCREMENTAL=0 cargo build --release --locked -p threadkeep-gateway -p threadkeep-benches --bin threadkeep --bin load

venv=$target/bench/langgraph
if scripts/venv.sh "$venv" &&
  "$venv/bin/python" -m pip install --quiet 'langgraph-cli[inmem]==0.4.40' 'langgraph==1.2.22' 'langgraph-api==0.16.7'; then
  case " $* " in *" --store"*) ;; *) set -- --store sqlite,postgres,langgraph "$@" ;; esac
  set -- --langgraph "$venv/bin/langgraph" "$@"
else
  echo "LangGraph's server cannot be installed; the gateway is measured alone" >&2
fi
exec "$target/release/load" --out "$target/bench/load.jsonl" "$@"
