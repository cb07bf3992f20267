#!/usr/bin/env bash
# Starts a gateway in its own directory, runs a command against it, stops it.
#
#   scripts/with-gateway.sh MODE COMMAND [ARGUMENT ...]
#
# MODE is the channel mode, full or delta. The command finds the gateway's address in GATEWAY_URL. With WITH_KEYS=1 the
# gateway requires an API key, which the command finds where SDK clients look for it. SCRIPT names a file with the answers
# of its model. THREADKEEP_BINARY names a binary that is already built.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
fi
mode=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
missing=()
for tool in curl python3; do command -v "$tool" > /dev/null || missing+=("$tool"); done
[ ${#missing[@]} = 0 ] || "$root/scripts/install.sh" "${missing[@]}"

# The proxy of the environment does not know this machine's gateway.
no_proxy=${no_proxy:-${NO_PROXY:-}}
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
export NO_PROXY="$no_proxy"

home=$(mktemp -d)
gateway=
stop() {
    if [ -n "$gateway" ]; then
        kill "$gateway" 2> /dev/null || true
        wait "$gateway" 2> /dev/null || true
    fi
    rm -rf "$home"
}
trap stop EXIT
cat > "$home/config.yaml" <<CONFIG
config_version: 49
database:
  backend: sqlite
  checkpoint_channel_mode: $mode
run_events:
  backend: db
subagent_batches:
  enabled: true
auth:
  enabled: ${WITH_KEYS:+true}
CONFIG
if [ -n "${SCRIPT:-}" ]; then
    printf 'models:\n  - {name: scripted, use: scripted, model: scripted, script: "%s"}\n' "$(realpath "$SCRIPT")" >> "$home/config.yaml"
fi

binary=${THREADKEEP_BINARY:-}
if [ -z "$binary" ]; then
    cargo build --locked -q --manifest-path "$root/Cargo.toml" -p threadkeep-gateway
    binary="${CARGO_TARGET_DIR:-$root/target}/debug/threadkeep"
fi
threadkeep() { SVC_HOME="$home/state" SVC_CONFIG_PATH="$home/config.yaml" exec "$binary" "$@"; }
if [ -n "${WITH_KEYS:-}" ]; then
    LANGGRAPH_API_KEY=$(threadkeep keys create --user sdk 2> /dev/null)
    export LANGGRAPH_API_KEY
fi
# The log exists before the gateway's process opens it: on a busy machine the loop below may read it first.
: > "$home/log"
# The system chooses the port: one that was free a moment ago may be taken by now.
threadkeep serve --port 0 > "$home/log" 2>&1 &
gateway=$!

# On a busy machine this may take a while; after ten minutes it is given up.
for _ in $(seq 6000); do
    GATEWAY_URL=$(sed -n 's/.*serving on \(http[^, ]*\).*/\1/p' "$home/log" | head -n 1)
    if [ -n "$GATEWAY_URL" ] && curl -fsS "$GATEWAY_URL/health" > /dev/null 2>&1; then
        export GATEWAY_URL
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
