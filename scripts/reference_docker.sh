#!/usr/bin/env bash
# What `make test-images` needs beside set-up: a Debian with docker.io and BuildKit of today, in a directory.
STEP=images
. "$(dirname "$0")/lib.sh"

# The release of the host may be years old, and its BuildKit with it: the reference is that of Debian unstable.
SUITE=sid
INCLUDE=docker.io,docker-cli,docker-buildx,busybox-static,ca-certificates,git,xz-utils
TREE=/var/lib/pagurus/reference-docker

need_root
if [ ! -d "$TREE" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$mirror" ] || die "apt knows no Debian mirror" "add a Debian source to /etc/apt/sources.list"
    say "install Debian's docker.io and docker-buildx (about 250 MB, 700 MB below $TREE)"
    mkdir -p -m 700 "$(dirname "$TREE")"
    rm -rf "$TREE.new"
    ABOUT=180 quiet reference-docker debootstrap --variant=minbase --include="$INCLUDE" "$SUITE" "$TREE.new" "$mirror" ||
        die "the tree could not be built" "see $LOGS/reference-docker.log"
    rm -f "$TREE.new"/var/cache/apt/archives/*.deb
    mv "$TREE.new" "$TREE"
fi
say "the reference is $(chroot "$TREE" dpkg-query -W -f '${Package} ${Version}, ' docker.io docker-buildx)in $TREE"
