# Installs packages without starting their services. Arguments: the packages.
set -eu
if ! command -v apt-get > /dev/null; then
    echo "this machine has no apt-get" >&2
    exit 1
fi
sudo=
if [ "$(id -u)" != 0 ]; then
    sudo="sudo -n"
fi
# One at a time: test processes run concurrently.
exec 9> "${TMPDIR:-/tmp}/threadkeep-install-$(id -u).lock"
flock 9
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $sudo tee "$policy" > /dev/null
    $sudo chmod +x "$policy"
    trap '$sudo rm -f "$policy"' EXIT
fi
# The system may be updating its own packages: waiting for the lock of the lists is not an option of apt-get. And lists
# that could not be fetched are no failure of the update.
for attempt in 1 2 3 4 5 6; do
    $sudo apt-get -qq update || true
    if $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends -o Acquire::Retries=10 \
        -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confold install "$@"; then
        exit 0
    fi
    [ "$attempt" = 6 ] || sleep 10
done
exit 1
