#!/usr/bin/env bash
# Tools from outside, against programs of others from npm: an agent built with the official SDK of the Agent Client Protocol, the
# adapter of a coding agent, which has no key here, and a server that exercises the Model Context Protocol, over both transports.
# THREADKEEP_BINARY names a binary that is already built.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    "$root/scripts/install.sh" nodejs npm
fi
# Without it, no process would be found to be left.
command -v pgrep > /dev/null || "$root/scripts/install.sh" procps
place=${CARGO_TARGET_DIR:-$root/target}/tools-js
mkdir -p "$place"
if [ ! -d "$place/node_modules/@modelcontextprotocol/server-everything" ]; then
    npm install --silent --no-audit --no-fund --fetch-retries 10 --prefix "$place" @agentclientprotocol/sdk@2.4.0 \
        @zed-industries/codex-acp@0.16.0 @modelcontextprotocol/server-everything@2026.8.31
fi
cp "$root/scripts/tools_agent.mjs" "$place/"
binary=${THREADKEEP_BINARY:-}
if [ -z "$binary" ]; then
    cargo build --locked -q --manifest-path "$root/Cargo.toml" -p threadkeep-gateway
    binary="${CARGO_TARGET_DIR:-$root/target}/debug/threadkeep"
fi

home=$(mktemp -d)
web=
trap '[ -z "$web" ] || kill "$web" 2> /dev/null || true; rm -rf "$home"' EXIT
programs="$place/node_modules/.bin"
# The server takes no port 0.
port=$(node -e 's = require("net").createServer().listen(0, () => { console.log(s.address().port); s.close() })')
PORT=$port "$programs/mcp-server-everything" streamableHttp > "$home/web.log" 2>&1 &
web=$!
for _ in $(seq 6000); do
    grep -q "port $port" "$home/web.log" && break
    kill -0 "$web" || { cat "$home/web.log"; exit 1; }
    sleep 0.1
done

cat > "$home/script.json" <<'JSON'
{"rules": [
  {"when": {"contains": ["official"]}, "answers": [
    {"text": "", "tool_calls": [{"name": "invoke_acp_agent", "args": {"agent": "official", "prompt": "Hello"}}]},
    {"text": "{{tool_result}}"}]},
  {"when": {"contains": ["adapter"]}, "answers": [
    {"text": "", "tool_calls": [{"name": "invoke_acp_agent", "args": {"agent": "adapter", "prompt": "Hello"}}]},
    {"text": "{{tool_result}}"}]},
  {"when": {"contains": ["stdio"]}, "answers": [
    {"text": "", "tool_calls": [{"name": "tool_search", "args": {"query": "select:mcp_stdio_echo"}}]},
    {"text": "", "tool_calls": [{"name": "mcp_stdio_echo", "args": {"message": "one"}}]},
    {"text": "{{tool_result}}"}]},
  {"when": {"contains": ["http"]}, "answers": [
    {"text": "", "tool_calls": [{"name": "tool_search", "args": {"query": "+http_echo"}}]},
    {"text": "", "tool_calls": [{"name": "mcp_http_echo", "args": {"message": "two"}}]},
    {"text": "{{tool_result}}"}]},
  {"answers": [
    {"text": "", "tool_calls": [{"name": "tool_search", "args": {"query": "image"}}]},
    {"text": "", "tool_calls": [{"name": "mcp_stdio_get-tiny-image", "args": {}}]},
    {"text": "{{tool_result}}"}]}
]}
JSON
cat > "$home/config.yaml" <<CONFIG
config_version: 49
models: [{name: m, use: scripted, model: m, script: script.json}]
tool_search: {enabled: true}
acp_agents:
  official: {command: node, args: [$place/tools_agent.mjs], description: Answers, auto_approve_permissions: true, timeout_seconds: 600}
  adapter: {command: $programs/codex-acp, env: {HOME: $home}, description: Codes, timeout_seconds: 600}
mcp_servers:
  stdio: {command: $programs/mcp-server-everything, args: [stdio]}
  http: {url: "http://127.0.0.1:$port/mcp"}
CONFIG

failed=0
check() {
    local question=$1 expected=$2 answer
    answer=$(SVC_HOME="$home/state" "$binary" chat --config "$home/config.yaml" --subagents --print "$question" 2>&1) || true
    if [[ $answer == *"$expected"* ]]; then
        echo "ok: $question"
    else
        printf 'FAILED: %s\n  expected: %s\n  got: %.2000s\n' "$question" "$expected" "$answer"
        failed=1
    fi
}
check "the official SDK" "session of 2 servers, allowed once, asked: Hello"
# It speaks the protocol up to the point where it needs a key.
check "the adapter" "Error invoking ACP agent 'adapter': session/new failed: Authentication required"
check "an echo over stdio" "Echo: one"
check "an echo over http" "Echo: two"
check "a picture" "[an image was left out: image/png]"
# Guards have less than a second to end what is left, which a busy machine may not give them.
for _ in $(seq 600); do
    pgrep -f "$programs/mcp-server-everything stdio|$place/tools_agent.mjs" > /dev/null || break
    sleep 0.1
done
if pgrep -af "$programs/mcp-server-everything stdio|$place/tools_agent.mjs|$place/.*codex-acp"; then
    echo "FAILED: processes are left"
    failed=1
fi
exit $failed
