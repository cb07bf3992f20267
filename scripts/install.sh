#!/usr/bin/env bash
# Installs Debian packages that a script needs, without starting the services that they bring. Arguments: the packages.
set -euo pipefail
if ! command -v apt-get > /dev/null; then
    echo "install $* first: this machine has no apt-get" >&2
    exit 1
fi
sh "$(dirname "$0")/../testing/src/install.sh" "$@" || { echo "install $* first" >&2; exit 1; }
