#!/usr/bin/env bash
# Runs the tests or benches of a cargo command whose names contain one of NAMES; without one, all. If none contains a name, this
# fails and lists those that there are: cargo itself succeeds where it has nothing to run.
#
#   scripts/named.sh COMMAND [ARGUMENT ...] -- [NAME ...] [OPTION ...]
set -euo pipefail
command=()
while [ "${1:?there is no --}" != -- ]; do
    command+=("$1")
    shift
done
shift
names=()
while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    names+=("$1")
    shift
done
listed() { cargo "${command[@]}" -- --list "$1" | sed -nE 's/: (test|benchmark)$//p'; }
for name in "${names[@]}"; do
    found=$(listed "$name")
    [ -z "$found" ] || continue
    # Of a name in a module, those in that module.
    there=$(listed "${name%"${name##*::}"}")
    printf 'nothing is called %s; there are:\n%s\n' "$name" "$there" >&2
    exit 1
done
exec cargo "${command[@]}" -- "${names[@]}" "$@"
