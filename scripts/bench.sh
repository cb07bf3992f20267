#!/usr/bin/env bash
# Runs a plan of the workload runner (short, peers, targets) and leaves rows, tables and plots in target/bench. For `peers` it
# installs the newest LangGraph savers into a private Python environment there.
set -euo pipefail
cd "$(dirname "$0")/.."
plan=${1:?which plan: short, peers or targets}
shift
target=${CARGO_TARGET_DIR:-target}
out=$target/bench/$plan
mkdir -p "$out"
rm -f "$out/rows.jsonl"

# Incremental builds generate slower code.
CARGO_INCREMENTAL=0 cargo build --release --locked -p threadkeep-benches --bin workloads
workloads=$target/release/workloads

if [ "$plan" = peers ]; then
  venv=$target/bench/venv
  python=$venv/bin/python
  scripts/venv.sh "$venv"
  "$python" -m pip install --quiet --upgrade \
    langgraph langgraph-checkpoint-sqlite langgraph-checkpoint-postgres 'psycopg[binary]'
  set -- --python "$python" "$@"
fi

# All databases are created in TMPDIR, which should be on a disk.
status=0
"$workloads" plan "$plan" --out "$out/rows.jsonl" "$@" > /dev/null || status=$?
"$workloads" summarize "$out/rows.jsonl" --plots "$out/plots" | tee "$out/tables.txt"
echo "rows: $out/rows.jsonl   plots: $out/plots/index.html"
exit "$status"
