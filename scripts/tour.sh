#!/usr/bin/env bash
# The README's tour against the gateway at GATEWAY_URL (default http://127.0.0.1:8001). Exits non-zero when an answer differs.
set -euo pipefail
base=${GATEWAY_URL:-http://127.0.0.1:8001}
thread="tour-$$-$(date +%s)"
checks=0

# field JSON EXPRESSION: evaluates a Python expression on the document `d`, which may be larger than a program's arguments.
field() { printf '%s' "$1" | python3 -c 'import json, sys; d = json.load(sys.stdin); print(eval(sys.argv[1]))' "$2"; }
expect() { # expect WHAT ACTUAL WANTED
    if [ "$2" != "$3" ]; then
        printf 'FAIL  %s\n      got    %s\n      wanted %s\n' "$1" "$2" "$3" >&2
        exit 1
    fi
    printf 'ok    %s\n' "$1"
    checks=$((checks + 1))
}
get() { curl -fsS "$base$1"; }
post() { curl -fsS -H 'content-type: application/json' "$base$1" -d "$2"; }
status() { curl -s -o /dev/null -w '%{http_code}' -H 'content-type: application/json' "$@"; }
ask() { printf '{"input": {"messages": [{"role": "user", "content": "%s"}]}, "stream_mode": ["updates", "values"]}' "$1"; }

expect "the gateway is healthy" "$(field "$(get /health)" 'd["status"]')" healthy
expect "a model is configured" "$(field "$(get /api/models)" 'len(d["models"]) > 0')" True
expect "it describes itself" "$(field "$(get /openapi.json)" '"/api/threads/{thread_id}/runs/stream" in d["paths"]')" True

created=$(post /api/threads "{\"thread_id\": \"$thread\", \"metadata\": {\"tour\": \"$thread\"}}")
expect "a thread is created" "$(field "$created" 'd["thread_id"], d["status"]')" "('$thread', 'idle')"

values=$(post "/api/threads/$thread/runs/wait" "$(ask 'Hello there')")
expect "a turn is a question and an answer" "$(field "$values" '[m["type"] for m in d["messages"]]')" "['human', 'ai']"
expect "the demo model says that it is one" "$(field "$values" '"demo" in d["messages"][1]["content"]')" True
expect "the thread has a title" "$(field "$values" 'd["title"]')" "Hello there"

stream=$(curl -fsSN -H 'content-type: application/json' "$base/api/threads/$thread/runs/stream" -d "$(ask 'please write a file')")
names=$(printf '%s\n' "$stream" | sed -n 's/^event: //p' | uniq | tr '\n' ' ')
expect "a stream shows a tool call" "$names" "metadata values updates values updates values updates values end "

delegating='{"input": {"messages": [{"role": "user", "content": "research three things"}]}, "context": {"subagent_enabled": true}, "stream_mode": ["custom"]}'
post /api/threads "{\"thread_id\": \"$thread-delegating\"}" > /dev/null
delegated=$(curl -fsSN -H 'content-type: application/json' "$base/api/threads/$thread-delegating/runs/stream" -d "$delegating")
expect "three subagents report" "$(printf '%s\n' "$delegated" | grep -c '"type":"task_completed"')" 3
executions=$(get "/api/threads/$thread-delegating/executions")
expect "and what they did is recorded" "$(field "$executions" '[e["status"] for e in d["executions"]]')" "['completed', 'completed', 'completed']"
expect "their thread is deleted with them" "$(field "$(curl -fsS -X DELETE "$base/api/threads/$thread-delegating")" 'd["success"]')" True

state=$(get "/api/threads/$thread/state")
expect "the state has both turns" "$(field "$state" '[m["type"] for m in d["values"]["messages"]]')" \
    "['human', 'ai', 'human', 'ai', 'tool', 'ai']"
expect "nothing is left to run" "$(field "$state" 'd["next"]')" "[]"

history=$(post "/api/threads/$thread/history" '{"limit": 100}')
expect "history is newest first" "$(field "$history" 'd == sorted(d, key=lambda e: e["checkpoint_id"], reverse=True)')" True
first=$(field "$history" 'd[-2]["checkpoint_id"]')

forked=$(post "/api/threads/$thread/state" "{\"checkpoint_id\": \"$first\", \"values\": {\"title\": \"A fork\"}}")
expect "an update of an older checkpoint is a fork" "$(field "$forked" 'd["parent_checkpoint_id"]')" "$first"
expect "which becomes the head" "$(field "$(get "/api/threads/$thread/state")" 'd["values"]["title"]')" "A fork"

runs=$(get "/api/threads/$thread/runs")
expect "both runs are listed, newest first" "$(field "$runs" '[r["status"] for r in d]')" "['success', 'success']"
run=$(field "$runs" 'd[0]["run_id"]')
events=$(get "/api/threads/$thread/runs/$run/events?event_types=llm.tool.result")
expect "the tool's result is in the events" "$(field "$events" 'd[0]["content"]["name"]')" write_file

found=$(post /api/threads/search "{\"metadata\": {\"tour\": \"$thread\"}}")
expect "the thread is found by its metadata" "$(field "$found" '[t["thread_id"] for t in d]')" "['$thread']"

expect "an unknown thread is 404" "$(status "$base/api/threads/no-such-thread")" 404
expect "an unknown option is 422" "$(status "$base/api/threads/$thread/runs" -d '{"nonsense": 1}')" 422
expect "the thread is deleted" "$(field "$(curl -fsS -X DELETE "$base/api/threads/$thread")" 'd["success"]')" True
expect "and gone" "$(status "$base/api/threads/$thread")" 404
echo "$checks passed, 0 failed"
