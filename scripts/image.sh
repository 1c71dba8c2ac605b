#!/usr/bin/env bash
# The base image "debian": what sandboxes start from when nothing else is asked for.
STEP=image
. "$(dirname "$0")/lib.sh"

SUITE=${PAGURUS_IMAGE_SUITE:-bookworm}
INCLUDE=python3,procps,iproute2 # beside Debian's essential packages, perl-base among them

main() {
    need_root
    if [ -d "$STATE/images/debian" ]; then
        say "base image debian is there ($STATE/images/debian)"
        return
    fi
    say "build the base image debian with debootstrap (a small Debian $SUITE that sandboxes start from)"
    PAGURUS_STATE=$STATE quiet image "$VENV/bin/pagurus" image debootstrap debian --suite "$SUITE" --include "$INCLUDE" ||
        die "the base image could not be built" "check the network and $LOGS/image.log; then run make setup again"
    say "base image debian is built ($(du -sh "$STATE/images/debian/" | cut -f 1))"
}

main
