#!/usr/bin/env bash
# Checks that the gateway at GATEWAY_URL does, or refuses by name, every field that the official SDKs can send, and that
# docs/fields.md says which. The SDKs are those that scripts/sdk-check.sh and scripts/sdk-check-js.sh install.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=${CARGO_TARGET_DIR:-$root/target}/sdk-js
"$root/scripts/sdk-check.sh" --install
"$root/scripts/sdk-check-js.sh" --install
cp "$root/scripts/sdk_fields.mjs" "$place/"
requests=$(mktemp)
trap 'rm -f "$requests"' EXIT
node "$place/sdk_fields.mjs" > "$requests"
"$root/.venv/bin/python" -W ignore "$root/scripts/sdk_fields.py" "${GATEWAY_URL:?start a gateway and set GATEWAY_URL}" "$requests" "$@"
