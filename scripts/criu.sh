#!/usr/bin/env bash
# CRIU >= 4.2 as $PREFIX/criu/bin/criu and its message classes (pycriu) in $PREFIX/criu/python.
#
# Older CRIU cannot dump a TCP listener on current kernels. Where the machine's own apt sources offer a
# recent one it is installed as usual; otherwise CRIU and every library it needs, libc included, are taken
# from a newer Debian suite of the same mirror, unpacked into the private prefix and run under their own
# loader. The system's packages stay untouched and apt checks every signature.
STEP=criu
. "$(dirname "$0")/lib.sh"

WANTED=4.2
SUITES=${PAGURUS_CRIU_SUITES:-forky sid}
HOME_DIR=$PREFIX/criu

installed_version() { "$HOME_DIR/bin/criu" --version 2>/dev/null | sed -n 's/^Version: //p'; }

write_launcher() { # write_launcher COMMAND
    mkdir -p "$1/bin"
    printf '#!/bin/sh\n# Runs the CRIU that set-up chose. Written by scripts/criu.sh.\nexec %s "$@"\n' "$2" >"$1/bin/criu"
    chmod 755 "$1/bin/criu"
}

unpack_pycriu() { # unpack_pycriu DEB INTO
    local tree
    tree=$(mktemp -d)
    dpkg-deb -x "$1" "$tree"
    mkdir -p "$2/python"
    cp -r "$(dirname "$(find "$tree" -type d -name pycriu -print -quit)")/pycriu" "$2/python/"
    rm -rf "$tree"
}

publish() { # publish STAGE: put a complete tree in place in one step
    rm -rf "$HOME_DIR.old"
    [ ! -e "$HOME_DIR" ] || mv "$HOME_DIR" "$HOME_DIR.old"
    mv "$1" "$HOME_DIR"
    rm -rf "$HOME_DIR.old"
}

from_own_sources() {
    local candidate stage
    candidate=$(apt-cache policy criu | sed -n 's/^ *Candidate: //p')
    [ -n "$candidate" ] && [ "$candidate" != "(none)" ] && version_at_least "$candidate" "$WANTED" || return 1
    say "install criu $candidate from the system's own packages"
    stage=$(mktemp -d "$PREFIX/criu.XXXXXX")
    quiet criu-install apt-get install -y --no-install-recommends criu || return 1
    (cd "$stage" && quiet pycriu-download apt-get -o APT::Sandbox::User=root download python3-pycriu) || return 1
    unpack_pycriu "$stage"/python3-pycriu_*.deb "$stage"
    rm -f "$stage"/*.deb
    write_launcher "$stage" "$(command -v criu || echo /usr/sbin/criu)"
    chmod 755 "$stage"
    publish "$stage"
}

from_newer_suite() { # from_newer_suite SUITE
    local suite=$1 work mirror stage deb libraries
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$mirror" ] || die "apt knows no Debian mirror" "add a Debian source to /etc/apt/sources.list and run apt-get update"
    work=$(mktemp -d "$PREFIX/apt.XXXXXX")
    mkdir -p "$work"/{lists/partial,cache/archives/partial,sources}
    : >"$work/status" # nothing counts as installed, so the libraries come along
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
        "$mirror" "$suite" >"$work/sources/newer.sources"
    local apt=(apt-get -o Dir::State="$work" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache"
        -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources"
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null
        -o APT::Install-Recommends=false -o Acquire::Languages=none
        -o APT::Sandbox::User=root) # the prefix may lie where apt's own user cannot read
    quiet criu-index "${apt[@]}" update || { rm -rf "$work"; return 1; }
    quiet criu-download "${apt[@]}" install -y --download-only criu || { rm -rf "$work"; return 1; }
    (cd "$work" && quiet pycriu-download "${apt[@]}" download python3-pycriu) || { rm -rf "$work"; return 1; }

    stage=$(mktemp -d "$PREFIX/criu.XXXXXX")
    chmod 755 "$stage"
    for deb in "$work"/cache/archives/*.deb; do dpkg-deb -x "$deb" "$stage"; done
    rm -rf "$stage/usr/share"
    unpack_pycriu "$work"/python3-pycriu_*.deb "$stage"
    rm -rf "$work"
    # By its own name, so that the prefix can be copied or packed; it is always called by an absolute one.
    libraries='${0%/bin/criu}/usr/lib/x86_64-linux-gnu'
    write_launcher "$stage" "\"$libraries/ld-linux-x86-64.so.2\" --library-path \"$libraries\" \"\${0%/bin/criu}/usr/sbin/criu\""
    publish "$stage"
}

main() {
    local suite
    need_root
    if version_at_least "$(installed_version || true)" "$WANTED" && [ -d "$HOME_DIR/python/pycriu" ]; then
        say "CRIU $(installed_version) is there (dumps and restores the processes of a sandbox)"
        return
    fi
    if ! from_own_sources; then
        for suite in $SUITES; do
            say "fetch CRIU and its libraries from Debian $suite into a private prefix (this system's is older than $WANTED)"
            ! from_newer_suite "$suite" || break
        done
    fi
    if ! version_at_least "$(installed_version || true)" "$WANTED"; then
        ! grep -qs 'is expired' "$LOGS/criu-index.log" ||
            die "apt refuses the mirror's index as expired" "check this machine's clock, or use an up-to-date mirror"
        die "no CRIU >= $WANTED could be installed" "check the network and the logs in $LOGS, or set PAGURUS_CRIU_SUITES to a Debian suite that has it"
    fi
    say "CRIU $(installed_version) installed"
}

main
