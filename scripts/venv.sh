#!/usr/bin/env bash
# Creates the virtual environment of Python DIR unless it exists. One without a pip that runs gets pip, and keeps what is in it:
# another program may have made it. If that does not work, its creation was interrupted or its interpreter is gone, and it is
# created again.
set -euo pipefail
venv=${1:?which directory}
python=${PYTHON:-python3}
has_pip() { "$venv/bin/pip" --version > /dev/null 2>&1; }
if has_pip; then
    exit
fi
# Debian has it in a package of its own.
"$python" -c 'import ensurepip' 2> /dev/null || "$(dirname "$0")/install.sh" python3-venv
if "$venv/bin/python" -m ensurepip --default-pip > /dev/null 2>&1 && has_pip; then
    exit
fi
"$python" -m venv --clear "$venv"
