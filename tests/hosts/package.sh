# What all ways of a host do with the package, and the acts that replace or remove the program of all others, as
# functions of bash.

JOB=${JOB:-/job}
export DEBIAN_FRONTEND=noninteractive
PYTHON=/opt/pagurus/bin/python3.11
failed=0

act() { # act NAME WRONG: note the result of an act on the package; WRONG says what is not as it should be
    local result=passed wrong
    wrong=$(printf '%s' "$2" | tr '[:cntrl:]"\\' ' ')
    [ -z "$wrong" ] || { result=failed; failed=$((failed + 1)); }
    printf '{"group": "package", "act": "%s", "result": "%s", "note": "%s", "seconds": 0}\n' "$1" $result "$wrong" \
        >>"$JOB/acts.jsonl"
}

what_is_left() { # what_is_left PATH...: those that exist, and processes and mounts of sandboxes
    local path
    for path in "$@"; do [ ! -e "$path" ] || echo "$path"; done
    pgrep --list-full pagurus-shim
    grep pagurus /proc/self/mounts
}

note_system() {
    uname -r >"$JOB/kernel"
    (. /etc/os-release && echo "$PRETTY_NAME") >"$JOB/os"
    cat /sys/kernel/security/lsm >"$JOB/lsm"
}

run_acts() { (cd "$JOB/tree" && $PYTHON -B -m tests.hosts.guest "$JOB/acts.jsonl" "$@"); }

install_package() { apt-get install -y -o Dpkg::Options::=--force-unsafe-io "$JOB/pagurus.deb"; }

run_benches() { # run_benches [OPTION OF tests.hosts.benches ...]
    # From here on the guest has a compiler, and sources that are not those of the package.
    systemctl stop pagurus
    dpkg --force-unsafe-io -i /var/cache/compiler/*.deb || return 1
    mkdir -p /srv/checkout && cp -a "$JOB/checkout/." /srv/checkout && cd /srv/checkout || return 1
    PAGURUS_PREFIX=/opt/pagurus/lib/python3/dist-packages/pagurus_runtime \
        $PYTHON -m tests.hosts.benches "$JOB/acts.jsonl" "$@"
    local status=$?
    cd "$JOB" && systemctl start pagurus
    return $status
}

remove_package() {
    local wrong path
    wrong=$(failure prepare_and_remove)
    for path in /etc/pagurus/daemon.toml /var/lib/pagurus/catalogue.sqlite /var/lib/pagurus/pool.btrfs; do
        [ -e $path ] || wrong="$wrong $path is gone"
    done
    act "removed, it leaves configuration and state, and no sandbox" "$wrong$(what_is_left /usr/bin/pagurus)"
}

prepare_and_remove() {
    pagurus run --name kept debian && pagurus exec kept 'echo kept >/srv/state' &&
        pagurus checkpoint take kept before --durable && echo '# kept' >>/etc/pagurus/daemon.toml &&
        apt-get remove -y pagurus
}

install_again() { act "installed again, it restores a sandbox of before" "$(failure install_and_restore)"; }

install_and_restore() {
    install_package && systemctl start pagurus && grep -q '# kept' /etc/pagurus/daemon.toml &&
        pagurus restore kept before --verify && [ "$(pagurus exec kept 'cat /srv/state')" = kept ]
}

failure() { # failure COMMAND: the end of what it said, if it failed
    local said
    said=$("$@" 2>&1) || printf '%s failed: %s' "$1" "$(printf '%s' "$said" | tail -c 300)"
}
