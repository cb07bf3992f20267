#!/usr/bin/env bash
# Creates the virtual environment of Python DIR unless it exists. One whose creation was interrupted has no pip, and is completed.
set -euo pipefail
venv=${1:?which directory}
[ ! -x "$venv/bin/pip" ] || exit 0
if ! "${PYTHON:-python3}" -m venv "$venv" 2> /dev/null; then
    rm -rf "$venv"
    "$(dirname "$0")/install.sh" python3-venv
    "${PYTHON:-python3}" -m venv "$venv"
fi
