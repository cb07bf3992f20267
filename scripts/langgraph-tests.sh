#!/usr/bin/env bash
# LangGraph's own tests of savers and graphs, unchanged, with our savers in the place of LangGraph's (scripts/langgraph_tests.py).
# They are in the source distributions on PyPI, which are downloaded; none of them is in this repository. ARGS go to pytest.
# Started by `scripts/python-test.sh --langgraph`, which builds and installs the package first. STORES: "sqlite postgres".
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
target="${CARGO_TARGET_DIR:-$root/target}"
python=${1:?the interpreter of an environment with the package}
shift
STORES=${STORES:-sqlite postgres}
for store in $STORES; do
    case $store in
        sqlite | postgres) ;;
        *)
            echo "no store is called $store; there are: sqlite postgres" >&2
            exit 1
            ;;
    esac
done
sources="$target/python/langgraph-tests"
mkdir -p "$sources"

# fetch PACKAGE VERSION SHA256: its sources, in $sources/PACKAGE.
fetch() {
    local archive="$sources/${1//-/_}-$2.tar.gz"
    if ! echo "$3  $archive" | sha256sum --check --status 2> /dev/null; then
        "$python" -m pip download -q --retries 10 --disable-pip-version-check --no-deps --no-binary :all: -d "$sources" "$1==$2"
        [ -f "$archive" ] || mv "$sources/$1-$2.tar.gz" "$archive"
        echo "$3  $archive" | sha256sum --check --quiet
    fi
    rm -rf "${sources:?}/$1"
    mkdir "$sources/$1"
    tar -xzf "$archive" -C "$sources/$1" --strip-components 1
}

fetch langgraph 1.2.22 32700dc34b5cf9ebb397258c2e56392f017d4dbc51c9591339225c3c1b7b5126
fetch langgraph-checkpoint 4.3.2 fcab8468c7e965d7055e2a35c253d73a145624ef4728b150ca7c361f4afca286
fetch langgraph-checkpoint-sqlite 3.1.2 4e3f376fa6f192d6ad2a1a4643b039986f1593552ef870e9e45281575de6fbf2
fetch langgraph-checkpoint-postgres 3.2.0 dffef0e6822d7c614019f7f2c4bdbef42859746aee2d3e6d9d9747cf3744ca90
"$python" -m pip install -q --retries 10 --disable-pip-version-check -r "$root/python/requirements-langgraph.txt"

if [ -z "${THREADKEEP_POSTGRES_TEST_URL:-}" ]; then
    coproc server { exec "${THREADKEEP_TEST_POSTGRES:?the program that starts a Postgres}"; }
    read -r THREADKEEP_POSTGRES_TEST_URL <&"${server[0]}"
    export THREADKEEP_POSTGRES_TEST_URL
fi

# Without Docker, LangGraph's graphs are tested on its savers in memory and on SQLite: both are ours here.
export NO_DOCKER=true PYTHONPATH="$root/scripts" PYTHONDONTWRITEBYTECODE=1
# run STORE PACKAGE [ARGS]: the tests of a package that use savers.
run() {
    local files
    cd "$sources/$2/tests"
    files=$(grep -lE '_checkpointer|Saver\b' test_*.py | grep -vE 'store|ttl|jsonplus|remote_graph|benchmark|test_prune_postgres' | sed 's,^,tests/,')
    cd ..
    echo "$2 on $1"
    # shellcheck disable=SC2086 # Names of files.
    THREADKEEP_STORE=$1 "$python" -W ignore -m pytest -q -p langgraph_tests -p no:cacheprovider -o addopts= --tb=short "${@:3}" $files
}
failed=0
for store in $STORES; do
    run "$store" langgraph -p no:asyncio "$@" || failed=1
    for package in langgraph-checkpoint langgraph-checkpoint-sqlite; do
        run "$store" "$package" -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function "$@" || failed=1
    done
done
exit "$failed"
