#!/usr/bin/env bash
# The base image "debian": what sandboxes start from when nothing else is asked for.
# usage: image.sh fetch|import    fetch: the packages, which needs nothing of ours; import: the image, which needs .venv
STEP=image
. "$(dirname "$0")/lib.sh"

SUITE=${PAGURUS_IMAGE_SUITE:-bookworm}
INCLUDE=python3,procps,iproute2 # beside Debian's essential packages, perl-base among them
TREE=$STATE/.debian-$SUITE      # complete, once it has this name

fetch() {
    local mirror
    if [ -d "$STATE/images/debian" ]; then
        say "base image debian is there ($STATE/images/debian)"
        return
    fi
    [ ! -d "$TREE" ] || return 0
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$mirror" ] || die "apt knows no Debian mirror" "add a Debian source to /etc/apt/sources.list and run apt-get update"
    say "install a small Debian $SUITE for sandboxes (about 60 MB from $mirror, 250 MB below $STATE)"
    mkdir -p -m 700 "$STATE"
    rm -rf "$TREE.new"
    ABOUT=80 quiet image debootstrap --variant=minbase --include="$INCLUDE" "$SUITE" "$TREE.new" "$mirror" ||
        die "the base image could not be built" "check the network and $LOGS/image.log; then run make setup again"
    rm -f "$TREE.new"/var/cache/apt/archives/*.deb
    mv "$TREE.new" "$TREE"
}

import() {
    [ ! -d "$STATE/images/debian" ] || return 0
    PAGURUS_STATE=$STATE ABOUT=15 quiet image-import "$VENV/bin/pagurus" image import debian "$TREE" ||
        die "the base image could not be stored" "see $LOGS/image-import.log"
    rm -rf "$TREE"
    say "base image debian is built ($(du -sh "$STATE/images/debian/" | cut -f 1))"
}

need_root
case ${1:-} in
fetch | import) "$1" ;;
*) die "no part ${1:-}" "say fetch or import" ;;
esac
