#!/usr/bin/env bash
# CRIU >= 4.2 as $PREFIX/criu/bin/criu and its message classes (pycriu) in $PREFIX/criu/python.
#
# Older CRIU cannot dump a TCP listener on current kernels. CRIU and every library it needs, libc included, are those
# that scripts/debs.lock pins by their sha256: the ones that passed the tests. They come from the machine's own mirror,
# are unpacked into the private prefix and run under their own loader; the system's packages stay untouched. Where the
# mirror no longer has one of them, the newest of the machine's own sources or of a newer suite is taken, and said so.
. "$(dirname "$0")/debs.sh" ''
STEP=criu

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

# The notices that each package wants to be passed on with it: they go where its parts go.
keep_notices() { # keep_notices TREE INTO
    local notice name
    mkdir -p "$2"
    for notice in "$1"/usr/share/doc/*/copyright; do
        name=${notice%/copyright}
        [ ! -f "$notice" ] || cp -L "$notice" "$2/${name##*/}"
    done
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

unpack() { # unpack DIRECTORY: publish CRIU of the packages that lie there
    local stage deb libraries
    stage=$(mktemp -d "$PREFIX/criu.XXXXXX")
    chmod 755 "$stage"
    for deb in "$1"/*.deb; do
        case $deb in */python3-*) ;; *) dpkg-deb -x "$deb" "$stage" ;; esac
    done
    keep_notices "$stage" "$stage/notices"
    rm -rf "$stage/usr/share"
    (cd "$1" && ls -- *.deb) >"$stage/notices/PACKAGES"
    unpack_pycriu "$1"/python3-pycriu_*.deb "$stage"
    # By its own name, so that the prefix can be copied or packed; it is always called by an absolute one.
    libraries='${0%/bin/criu}/usr/lib/x86_64-linux-gnu'
    write_launcher "$stage" "\"$libraries/ld-linux-x86-64.so.2\" --library-path \"$libraries\" \"\${0%/bin/criu}/usr/sbin/criu\""
    publish "$stage"
}

from_pins() {
    local work status=0
    work=$(mktemp -d "$PREFIX/debs.XXXXXX")
    { fetch criu "$work" && unpack "$work"; } || status=1
    rm -rf "$work"
    return $status
}

from_newer_suite() { # from_newer_suite SUITE
    local work status=0
    work=$(mktemp -d "$PREFIX/apt.XXXXXX")
    {
        quiet criu-index private_apt "$work" "$1" update &&
            quiet criu-download private_apt "$work" "$1" install -y --download-only criu &&
            (cd "$work/cache/archives" && quiet pycriu-download private_apt "$work" "$1" download python3-pycriu) &&
            unpack "$work/cache/archives"
    } || status=1
    rm -rf "$work"
    return $status
}

main() {
    local suite
    need_root
    if version_at_least "$(installed_version || true)" "$WANTED" && [ -d "$HOME_DIR/python/pycriu" ]; then
        # A prefix of before notices were kept; where the mirror no longer has them, it stays as it is.
        [ -d "$HOME_DIR/notices" ] || [ ! -d "$HOME_DIR/usr" ] || from_pins || say "licence notices are missing"
        say "CRIU $(installed_version) is there (dumps and restores the processes of a sandbox)"
        return
    fi
    say "fetch CRIU and its libraries as scripts/debs.lock pins them"
    if ! from_pins && ! from_own_sources; then
        say "take the newest CRIU instead, which has not passed the tests (for the pinned one: PAGURUS_DEBIAN_MIRROR=URL"
        say "of a mirror or snapshot that still has it; a host without a mirror gets it with the package, see docs/hosts.md)"
        for suite in $SUITES; do
            say "fetch CRIU and its libraries from Debian $suite into a private prefix"
            ! from_newer_suite "$suite" || break
        done
    fi
    if ! version_at_least "$(installed_version || true)" "$WANTED"; then
        die "no CRIU >= $WANTED could be installed" "check the network and the logs in $LOGS, or set PAGURUS_CRIU_SUITES to a Debian suite that has it"
    fi
    say "CRIU $(installed_version) installed"
}

main
