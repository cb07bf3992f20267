#!/usr/bin/env bash
# Runs a hook `useStream` of the official SDK, unmodified, in React against the gateway at GATEWAY_URL: the one of PAGE, which is
# sdk_react (the SDK's own, on the routes of runs) or sdk_protocol (of @langchain/react, on the thread protocol). The gateway's
# model answers from the JSON file of that name. MODE is the gateway's channel mode. With --install the packages are only
# installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    "$root/scripts/install.sh" nodejs npm
fi
place=${CARGO_TARGET_DIR:-$root/target}/sdk-react
mkdir -p "$place"
if [ ! -d "$place/node_modules/@langchain/react" ]; then
    # The newest version of the SDK that has both hooks.
    npm install --silent --no-audit --no-fund --fetch-retries 10 --save-exact --prefix "$place" \
        @langchain/langgraph-sdk@1.11.0 @langchain/react@1.1.0 @langchain/protocol@0.0.19 @langchain/core@1.2.9 \
        react@19.2.8 react-dom@19.2.8 jsdom@26.1.0
fi
[ "${1:-}" != --install ] || exit 0
page=${PAGE:-sdk_react}
# Put there whole: the same check of another gateway may be reading it.
cp "$root/scripts/$page.mjs" "$place/$$.copy"
mv "$place/$$.copy" "$place/$page.mjs"
NODE_ENV=production exec node "$place/$page.mjs" "${GATEWAY_URL:?start a gateway and set GATEWAY_URL}" "${MODE:?full or delta}"
