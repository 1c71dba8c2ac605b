#!/usr/bin/env bash
# What `make test-parity` needs beside set-up: Debian's docker.io, and a file tree with the programs that are compared.
STEP=parity
. "$(dirname "$0")/lib.sh"

INCLUDE=python3,procps,iproute2,gcc,g++,libc6-dev,gdb,strace,sudo,iputils-ping,ccache,make,valgrind,bsdutils
TREE=/var/lib/pagurus/parity-tree

need_root
if [ ! -x /usr/sbin/dockerd ]; then
    say "install Debian's docker.io"
    quiet docker apt-get install -y --no-install-recommends docker.io ||
        die "docker.io could not be installed" "see $LOGS/docker.log"
fi
if [ ! -d "$TREE" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$mirror" ] || die "apt knows no Debian mirror" "add a Debian source to /etc/apt/sources.list"
    say "install the programs that are compared (about 300 MB, 900 MB below $TREE)"
    mkdir -p -m 700 "$(dirname "$TREE")"
    rm -rf "$TREE.new"
    quiet parity debootstrap --variant=minbase --include="$INCLUDE" bookworm "$TREE.new" "$mirror" ||
        die "the tree could not be built" "see $LOGS/parity.log"
    rm -f "$TREE.new"/var/cache/apt/archives/*.deb
    mv "$TREE.new" "$TREE"
fi
