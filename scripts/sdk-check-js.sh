#!/usr/bin/env bash
# Runs the official LangGraph SDK for JavaScript, unmodified, against the gateway at GATEWAY_URL.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    if ! command -v apt-get > /dev/null; then
        echo "install Node.js (18 or newer) and npm first" >&2
        exit 1
    fi
    sudo=$(command -v sudo || true)
    $sudo apt-get update -qq && $sudo apt-get install -y -qq nodejs npm
fi
# Node looks up packages next to the program.
place=${CARGO_TARGET_DIR:-$root/target}/sdk-js
mkdir -p "$place"
if [ ! -d "$place/node_modules/@langchain/langgraph-sdk" ]; then
    npm install --silent --no-audit --no-fund --prefix "$place" @langchain/langgraph-sdk@2.0.0
fi
cp "$root/scripts/sdk_check.mjs" "$place/"
exec node "$place/sdk_check.mjs" "${GATEWAY_URL:?start a gateway and set GATEWAY_URL}"
