#!/usr/bin/env bash
# Starts a gateway in a directory of its own, runs a command against it, stops it.
#
#   scripts/with-gateway.sh MODE COMMAND [ARGUMENT ...]
#
# MODE is the channel mode, full or delta. The command finds the gateway's address in GATEWAY_URL. With WITH_KEYS=1 the
# gateway asks for an API key, which the command finds where SDK clients look for it.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,7p' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
fi
mode=$1
shift
missing=()
for tool in curl python3; do command -v "$tool" > /dev/null || missing+=("$tool"); done
if [ ${#missing[@]} -gt 0 ]; then
    if ! command -v apt-get > /dev/null; then
        echo "install ${missing[*]} first" >&2
        exit 1
    fi
    sudo=$(command -v sudo || true)
    $sudo apt-get update -qq && $sudo apt-get install -y -qq "${missing[@]}"
fi
root=$(cd "$(dirname "$0")/.." && pwd)
home=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat > "$home/config.yaml" <<CONFIG
config_version: 49
database:
  backend: sqlite
  checkpoint_channel_mode: $mode
run_events:
  backend: db
auth:
  enabled: ${WITH_KEYS:+true}
CONFIG

cargo build --locked -q --manifest-path "$root/Cargo.toml" -p threadkeep-gateway
binary="${CARGO_TARGET_DIR:-$root/target}/debug/threadkeep"
threadkeep() { SVC_HOME="$home/state" SVC_CONFIG_PATH="$home/config.yaml" exec "$binary" "$@"; }
if [ -n "${WITH_KEYS:-}" ]; then
    LANGGRAPH_API_KEY=$(threadkeep keys create --user sdk 2> /dev/null)
    export LANGGRAPH_API_KEY
fi
threadkeep serve --port "$port" > "$home/log" 2>&1 &
gateway=$!
stop() {
    kill "$gateway" 2> /dev/null || true
    wait "$gateway" 2> /dev/null || true
    rm -rf "$home"
}
trap stop EXIT
export GATEWAY_URL="http://127.0.0.1:$port"

for _ in $(seq 100); do
    if curl -fsS "$GATEWAY_URL/health" > /dev/null 2>&1; then
        status=0
        "$@" || status=$?
        [ "$status" = 0 ] || { echo "-- the gateway's log:" >&2; tail -n 40 "$home/log" >&2; }
        exit "$status"
    fi
    kill -0 "$gateway" 2> /dev/null || break
    sleep 0.1
done
echo "the gateway did not start; its log:" >&2
cat "$home/log" >&2
exit 1
