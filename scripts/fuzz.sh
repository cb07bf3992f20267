#!/usr/bin/env bash
# Runs each fuzz target for SECONDS seconds (default 60), or only the named ones. Failing inputs go to fuzz/artifacts:
# copy them to fuzz/corpus with the fix, and every test run replays them. New inputs that only add coverage stay in
# fuzz/target.
set -euo pipefail
seconds=${FUZZ_SECONDS:-60}
cd "$(dirname "$0")/../fuzz"
if ! rustup toolchain list | grep -q '^nightly'; then
    echo "fuzzing needs a nightly toolchain; install one with: rustup toolchain install nightly --profile minimal" >&2
    exit 1
fi
command -v cargo-fuzz > /dev/null || cargo install --locked cargo-fuzz@0.13.2
# The bundled SQLite has two copies of a constant, which is not our bug.
export ASAN_OPTIONS="detect_odr_violation=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
targets=$(cargo +nightly fuzz list --fuzz-dir .)
for target in "$@"; do
    grep -qxF -- "$target" <<< "$targets" && continue
    printf 'no target is called %s; there are:\n%s\n' "$target" "$targets" >&2
    exit 1
done
# shellcheck disable=SC2086 # Names without spaces.
[ $# -gt 0 ] || set -- $targets
for target in "$@"; do
    printf '\n== %s, %s s\n' "$target" "$seconds"
    corpus=corpus/${target%_sqlite} # The two targets of programs share one.
    [ -d "$corpus" ] || corpus=corpus/$target
    mkdir -p "target/corpus/$target"
    cargo +nightly fuzz run --fuzz-dir . "$target" "target/corpus/$target" "$corpus" \
        -- -max_total_time="$seconds" -timeout=30 -rss_limit_mb=4096 -print_final_stats=1
done
