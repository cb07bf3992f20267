#!/usr/bin/env bash
# LangGraph's savers and ours through a real graph, in one run; ARGS go to python/benches/savers.py.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
target="${CARGO_TARGET_DIR:-$root/target}"
venv="$target/python/bench"
"$root/scripts/python-test.sh" --library
(cd "$root" && cargo build -q --locked -p threadkeep-testing --example postgres)
"$root/scripts/venv.sh" "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check -r "$root/python/requirements.txt"
"$venv/bin/pip" install -q --disable-pip-version-check --force-reinstall --no-deps "$target"/python/library/threadkeep-*.whl
cd "$target"
exec "$venv/bin/python" "$root/python/benches/savers.py" --postgres "$target/debug/examples/postgres" "$@"
