#!/usr/bin/env bash
# Runs the hook `useStream` of the official SDK, unmodified, in React against the gateway at GATEWAY_URL, whose model answers
# from scripts/sdk_react.json. MODE is the gateway's channel mode. With --install the packages are only installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    "$root/scripts/install.sh" nodejs npm
fi
place=${CARGO_TARGET_DIR:-$root/target}/sdk-react
mkdir -p "$place"
if [ ! -d "$place/node_modules/jsdom" ]; then
    # The newest version of the SDK that has this hook.
    npm install --silent --no-audit --no-fund --prefix "$place" \
        @langchain/langgraph-sdk@1.11.0 @langchain/core@1.2.9 react@19.2.8 react-dom@19.2.8 jsdom@26.1.0
fi
[ "${1:-}" != --install ] || exit 0
cp "$root/scripts/sdk_react.mjs" "$place/"
NODE_ENV=production exec node "$place/sdk_react.mjs" "${GATEWAY_URL:?start a gateway and set GATEWAY_URL}" "${MODE:?full or delta}"
