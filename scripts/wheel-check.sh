#!/usr/bin/env bash
# Uses the built wheel as its first user would, in an empty environment: the README's example word for word, then the
# command on what it wrote, then the gateway. PYTHON names the interpreter.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=("${CARGO_TARGET_DIR:-$root/target}"/wheels/threadkeep-*.whl)
[ -f "${wheels[0]}" ] || { echo "no wheel in ${wheels[0]%/*}: make wheel builds it" >&2; exit 1; }

place=$(mktemp -d)
gateway=
finish() {
    [ -z "$gateway" ] || kill "$gateway" 2> /dev/null || true
    rm -rf "$place"
}
trap finish EXIT
cd "$place"
# Nothing of this machine's or of the checkout may help.
unset PYTHONPATH THREADKEEP_BINARY SVC_CONFIG_PATH SVC_HOME
# The proxy of the environment does not know this machine's gateway.
no_proxy=${no_proxy:-${NO_PROXY:-}}
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
export NO_PROXY="$no_proxy"
"${PYTHON:-python3}" -m venv empty
echo "$("empty/bin/python" --version), $(basename "${wheels[0]}"): $(du -h "${wheels[0]}" | cut -f 1)"

check() { printf '%-70s' "$1"; }
ok() { echo ok; }
fail() { echo FAILED; cat "$@" >&2; exit 1; }
block() { awk -v kind='```'"$1" '$0 == kind {on = 1; next} on && /^```/ {exit} on' "$root/python/README.md"; }

check "it installs, with langgraph"
empty/bin/pip install -q --retries 10 --disable-pip-version-check "${wheels[0]}" langgraph > log 2>&1 || fail log
ok
check "the README's example prints what the README says"
block python > example.py
block text > expected
[ -s example.py ] && [ -s expected ] || fail example.py expected
empty/bin/python example.py > printed 2> log || fail log
diff expected printed > log || fail log
ok
run() {
    check "threadkeep $*"
    empty/bin/threadkeep "$@" > printed 2> log || fail log printed
}
run --help
ok
run import-langgraph --help
ok
run verify --all --sqlite checkpoints.db
grep -q '^1 thread: no violations.$' printed || fail printed
ok
run checkpoints list --thread 1 --sqlite checkpoints.db
[ "$(grep -c loop printed)" -ge 4 ] || fail printed
ok
run state get --thread 1 --sqlite checkpoints.db --json
grep -q 'You said: How are you?' printed || fail printed
ok
check "threadkeep serve, and a turn through its API"
empty/bin/threadkeep serve --port 0 > log 2>&1 &
gateway=$!
for _ in $(seq 6000); do
    url=$(sed -n 's/.*serving on \(http[^, ]*\).*/\1/p' log | head -n 1)
    [ -z "$url" ] || break
    kill -0 "$gateway" 2> /dev/null || fail log
    sleep 0.1
done
cat > turn.py <<'PYTHON'
import json, sys, urllib.request

def post(path, body):
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))

thread = post("/api/threads", {})["thread_id"]
turn = {"assistant_id": "lead_agent", "input": {"messages": [{"type": "human", "content": "Hello"}]}}
assert post(f"/api/threads/{thread}/runs/wait", turn)["messages"][-1]["type"] == "ai"
PYTHON
empty/bin/python turn.py "$url" > printed 2>&1 || fail printed log
ok
