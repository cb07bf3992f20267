#!/usr/bin/env bash
# Runs the official LangGraph SDK for JavaScript, unmodified, against the gateway at GATEWAY_URL.
# With --install it is only installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    "$root/scripts/install.sh" nodejs npm
fi
# Node looks up packages next to the program.
place=${CARGO_TARGET_DIR:-$root/target}/sdk-js
mkdir -p "$place"
if [ ! -d "$place/node_modules/@langchain/langgraph-sdk" ]; then
    npm install --silent --no-audit --no-fund --fetch-retries 10 --prefix "$place" @langchain/langgraph-sdk@2.0.0
fi
[ "${1:-}" != --install ] || exit 0
# Put there whole: the same check of another gateway may be reading it.
cp "$root/scripts/sdk_check.mjs" "$place/$$.copy"
mv "$place/$$.copy" "$place/sdk_check.mjs"
exec node "$place/sdk_check.mjs" "${GATEWAY_URL:?start a gateway and set GATEWAY_URL}"
