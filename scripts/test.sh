#!/usr/bin/env bash
# Runs everything that a change must pass: every Rust test, the official SDK clients, the README's tour.
#
#   scripts/test.sh
#
# A line per step: the result, how long it took, how many checks it made, its name. What the steps print goes to files in
# target/test-logs; a step that fails shows the end of its file and where it is. The last line has the sums.
set -uo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
[ "${target#/}" != "$target" ] || target=$PWD/$target
logs=$target/test-logs
rm -rf "$logs"
mkdir -p "$logs"
export CARGO_TERM_COLOR=never

passed=0
failed=0
number=0

# begin NAME: the next step; what it prints belongs in $log.
begin() {
    name=$1
    number=$((number + 1))
    log=$logs/$(printf '%02d' "$number")-$(tr -c 'a-zA-Z0-9\n' '-' <<< "$name").log
    began=$SECONDS
    : > "$log"
    # On a terminal the running step is visible, and its result replaces it.
    [ ! -t 1 ] || printf '...                           %s\033[K\r' "$name"
}

# end STATUS: counts what the step's programs say of themselves ("test result: ok. 3 passed; 0 failed; ..." or
# "3 passed, 0 failed"), and reports it. A step that fails without a count counts as one failure.
end() {
    local status=$1 counts good bad
    counts=$(grep -E '^(test result: .*|[0-9]+ passed, [0-9]+ failed)$' "$log" | grep -oE '[0-9]+ (passed|failed)')
    good=$(awk '$2 == "passed" { n += $1 } END { print n + 0 }' <<< "$counts")
    bad=$(awk '$2 == "failed" { n += $1 } END { print n + 0 }' <<< "$counts")
    [ "$status" = 0 ] || [ "$bad" != 0 ] || bad=1
    passed=$((passed + good))
    failed=$((failed + bad))
    [ ! -t 1 ] || printf '\033[K'
    if [ "$bad" = 0 ]; then
        printf 'ok     %5d s  %5d passed  %s\n' "$((SECONDS - began))" "$good" "$name"
    else
        printf 'FAILED %5d s  %5d passed  %s: %d failed; the end of %s:\n' \
            "$((SECONDS - began))" "$good" "$name" "$bad" "$log"
        tail -n 60 "$log" | sed 's/^/    | /'
    fi
}

step() { # step NAME COMMAND...
    begin "$1"
    shift
    "$@" >> "$log" 2>&1 < /dev/null
    end $?
}

# One line for each test program that cargo starts and that has tests.
rust_tests() {
    local running='' status='' line
    begin "cargo test"
    while IFS= read -r line; do
        case $line in
            '     Running '* | '   Doc-tests '*)
                [ -z "$running" ] || end_program "$status"
                running=yes status=0
                begin "$(title "$line")"
                ;;
            # Cargo says so after the program has ended, whether it has reported failures or crashed.
            'error: test failed'* | 'error: doctest failed'*) status=1 ;;
        esac
        printf '%s\n' "$line" >> "$log"
    done < <(cargo test --workspace --locked --no-fail-fast 2>&1 < /dev/null; echo $? > "$logs/status")
    [ -z "$running" ] || end_program "$status"
    status=$(cat "$logs/status")
    # Cargo itself has failed.
    if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
        name="cargo test"
        end "$status"
    fi
}

# end_program STATUS: ends the step, unless the program has no tests.
end_program() {
    if [ "$1" = 0 ] && grep -q '^test result' "$log" && ! grep -qE '^test result: .* [1-9][0-9]* (passed|failed)' "$log"; then
        return
    fi
    end "$1"
}

# "     Running tests/x.rs (.../deps/x-0123)" and "   Doc-tests name" as a reader wants them.
title() {
    case $1 in
        *Doc-tests*) printf 'examples in the documentation of %s' "${1##* }" ;;
        *)
            local program=${1##*/}
            program=${program%-*}
            local source=${1#*Running }
            printf '%s (%s)' "$program" "${source%% (*}"
            ;;
    esac
}

step "build the tests" cargo test --workspace --locked --no-run
if [ "$failed" = 0 ]; then
    rust_tests
    # The same build as that of the tests.
    export THREADKEEP_BINARY=$target/debug/threadkeep
    for mode in full delta; do
        step "tour, $mode mode" scripts/with-gateway.sh "$mode" scripts/tour.sh
        step "Python SDK, $mode mode" scripts/with-gateway.sh "$mode" scripts/sdk-check.sh
        step "JavaScript SDK, $mode mode" scripts/with-gateway.sh "$mode" scripts/sdk-check-js.sh
        step "useStream in React, $mode mode" \
            env MODE="$mode" SCRIPT=scripts/sdk_react.json scripts/with-gateway.sh "$mode" scripts/sdk-check-react.sh
    done
    step "Answers against the OpenAPI document" scripts/with-gateway.sh full scripts/openapi-check.sh
    step "Fields of the SDKs' requests" scripts/with-gateway.sh full scripts/sdk-fields.sh
    step "Python SDK with API keys" env WITH_KEYS=1 scripts/with-gateway.sh delta scripts/sdk-check.sh
fi
echo "in $((SECONDS / 60)) min $((SECONDS % 60)) s; what each step printed is in $logs"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
