#!/usr/bin/env bash
# Makes requests of the gateway's own OpenAPI document, valid and invalid ones, and compares what the gateway at
# GATEWAY_URL answers with what the document says. EXAMPLES (10) bounds the random ones of each operation.
# With --install the tester is only installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv="$root/.venv"
"$root/scripts/sdk-check.sh" --install
if [ ! -x "$venv/bin/schemathesis" ]; then
    "$venv/bin/pip" install -q --retries 10 'schemathesis==4.32.5'
fi
[ "${1:-}" != --install ] || exit 0
: "${GATEWAY_URL:?start a gateway and set GATEWAY_URL}"
# The same requests every time: a failure can be repeated. The tester would also repeat what it remembers in its directory.
memory=$(mktemp -d)
trap 'rm -rf "$memory"' EXIT
cd "$memory"
status=0
SCHEMATHESIS_HOOKS=openapi_hooks PYTHONPATH="$root/scripts" "$venv/bin/schemathesis" --config-file "$root/scripts/openapi-check.toml" run "$GATEWAY_URL/openapi.json" \
    --phases examples,coverage,fuzzing --seed 20 --max-examples "${EXAMPLES:-10}" --no-shrink --request-timeout 600 \
    --workers 1 --no-color || status=$?
[ "$status" = 0 ] && echo "1 passed, 0 failed" || echo "0 passed, 1 failed"
exit "$status"
