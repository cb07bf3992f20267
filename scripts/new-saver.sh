#!/usr/bin/env bash
# Writes the crate of a new saver from scripts/new-saver/. Usage: scripts/new-saver.sh NAME [DIRECTORY]
set -euo pipefail

name=${1:-}
repository=$(cd "$(dirname "$0")/.." && pwd)
template=$repository/scripts/new-saver
if ! [[ $name =~ ^[a-z][a-z0-9]*$ ]]; then
  echo "new-saver: the name is missing, or is not of small letters and digits; try: make new-saver NAME=leveldb" >&2
  exit 2
fi
# Cargo takes no two packages of one name, and the new one uses some of these.
if grep -qx "name = \"threadkeep-$name\"" "$repository/Cargo.lock"; then
  echo "new-saver: this repository has a crate threadkeep-$name; choose another name: make new-saver NAME=my$name" >&2
  exit 2
fi
directory=${2:-$repository/../threadkeep-$name}
if [ -e "$directory" ]; then
  echo "new-saver: $directory exists; remove it, or choose another directory: make new-saver NAME=$name DIR=..." >&2
  exit 2
fi

mkdir -p "$directory/src" "$directory/tests"
fill() { # TEMPLATE FILE
  sed -e "s|@NAME@|$name|g" -e "s|@TYPE@|${name^}|g" -e "s|@REPOSITORY@|$repository|g" "$template/$1" > "$directory/$2"
}
fill Cargo.toml.in Cargo.toml
fill lib.rs.in src/lib.rs
fill conformance.rs.in tests/conformance.rs
fill README.md.in README.md
# The same versions of all dependencies.
cp "$repository/Cargo.lock" "$directory/Cargo.lock"

echo "$directory is a crate that compiles. Its tests say what to write next:"
echo "  cd $directory && cargo test"
