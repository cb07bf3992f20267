#!/usr/bin/env bash
# Runs the official LangGraph SDK for Python, unmodified, against the gateway at GATEWAY_URL.
# With --install it is only installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv="$root/.venv"
"$root/scripts/venv.sh" "$venv"
# The environment may be somebody's own, with another version.
version=0.4.14
if [ "$("$venv/bin/python" -c 'import importlib.metadata as all; print(all.version("langgraph-sdk"))' 2> /dev/null)" != "$version" ]; then
    "$venv/bin/pip" install -q --retries 10 "langgraph-sdk==$version"
fi
[ "${1:-}" != --install ] || exit 0
exec "$venv/bin/python" "$root/scripts/sdk_check.py" "${GATEWAY_URL:?start a gateway and set GATEWAY_URL}"
