#!/usr/bin/env bash
# What `make test-parity` needs beside set-up: Debian's docker.io, and a file tree with the programs that are compared.
STEP=parity
. "$(dirname "$0")/lib.sh"

PROGRAMS="python3 libpython3.11-testsuite procps iproute2 gcc g++ libc6-dev gdb strace sudo iputils-ping ccache make cmake
    valgrind bsdutils perl git nodejs default-jdk-headless golang-go stress-ng acl attr bc file less man-db zip unzip
    postgresql redis-server nginx-light cron tmux vim-tiny openssh-server openssh-client sqlite3 gunicorn lsof socat
    python3-venv bzip2 xz-utils tzdata libglib2.0-tests dbus cargo mariadb-server rabbitmq-server chromium
    jupyter-notebook celery python3-redis"
# As a tree of an image store, whose folder is named by what is in it: forks look for that. `tree` leads to the newest.
KEPT=$STATE/parity/$(printf '%s' "$PROGRAMS" | sha256sum | cut -c 1-64)
TREE=$KEPT/tree

need_root
if [ ! -x /usr/sbin/dockerd ]; then
    say "install Debian's docker.io"
    quiet docker apt-get install -y --no-install-recommends docker.io ||
        die "docker.io could not be installed" "see $LOGS/docker.log"
fi
if [ ! -d "$TREE" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$mirror" ] || die "apt knows no Debian mirror" "add a Debian source to /etc/apt/sources.list"
    say "install the programs that are compared (about 1 GB, 4 GB below $TREE)"
    mkdir -p -m 700 "$(dirname "$TREE")"
    rm -rf "$TREE.new"
    ABOUT=120 quiet parity debootstrap --variant=minbase bookworm "$TREE.new" "$mirror" ||
        die "the tree could not be built" "see $LOGS/parity.log"
    printf '#!/bin/sh\nexit 101\n' >"$TREE.new/usr/sbin/policy-rc.d" # no package starts its service here
    chmod 755 "$TREE.new/usr/sbin/policy-rc.d"
    mkdir -p "$TREE.new/usr/share/man/man1" "$TREE.new/usr/share/man/man7"
    mount -t proc proc "$TREE.new/proc" # which the installation of a JVM reads
    trap 'umount "$TREE.new/proc"' EXIT
    # shellcheck disable=SC2086 # a list of packages
    ABOUT=400 quiet parity-programs chroot "$TREE.new" apt-get install -y --no-install-recommends $PROGRAMS ||
        die "the programs could not be installed" "see $LOGS/parity-programs.log"
    umount "$TREE.new/proc"
    trap - EXIT
    rm -rf "$TREE.new/usr/sbin/policy-rc.d" "$TREE.new"/var/cache/apt/archives/*.deb
    printf '{"source": "programs of make test-parity", "created_at": 0, "size": 0, "config": {}}\n' >"$KEPT/image.json"
    mv "$TREE.new" "$TREE"
fi
ln -sfn "$TREE" "$STATE/parity/tree"
