#!/usr/bin/env bash
# Creates the virtual environment of Python DIR unless it exists. One whose pip does not run is created again: its creation was
# interrupted, or its interpreter is gone.
set -euo pipefail
venv=${1:?which directory}
if "$venv/bin/pip" --version > /dev/null 2>&1; then
    exit
fi
create() { "${PYTHON:-python3}" -m venv --clear "$venv"; }
if ! create 2> /dev/null; then
    "$(dirname "$0")/install.sh" python3-venv
    create
fi
