#!/bin/bash
# What a guest does with the package: install it, start its unit, run acts and benches, remove it, purge it. In /job.
# usage: bash tree/tests/hosts/guest.sh [--only WORD] [--done FILE]    exit status: failed acts, or over 100
# Benches run where there is a directory `checkout`.
set -x
. tree/tests/hosts/package.sh

install_package || exit 101
mkdir -p /run/systemd/system/pagurus.service.d
printf '[Service]\nTimeoutStartSec=3600\nWatchdogSec=600\n' >/run/systemd/system/pagurus.service.d/slow.conf
systemctl daemon-reload
systemctl start pagurus || { journalctl -u pagurus | tail -n 30; exit 102; }
note_system
command -v gcc clang cc && exit 103
run_acts "$@"
status=$?

if [ -d checkout ]; then
    run_benches "$@"
    status=$((status + $?))
fi

remove_package
install_again
apt-get purge -y pagurus
act "purged, it leaves nothing" "$(what_is_left /var/lib/pagurus /run/pagurus /etc/pagurus)"
journalctl -u pagurus --output=cat >/job/daemon.log
exit $((status + failed))
