#!/usr/bin/env bash
# Debian packages that the rest needs: compilers for the native parts, file-system and network tools.
STEP=system
. "$(dirname "$0")/lib.sh"

PACKAGES=(
    clang libbpf-dev libbpf1 bpftool      # compile and load the inspector
    gcc libc6-dev linux-libc-dev          # compile the shim and pid 1
    btrfs-progs                           # the pool of sandbox trees
    debootstrap                           # the base image
    skopeo                                # images from registries
    iproute2 nftables iptables            # network of sandboxes; CRIU calls iptables-restore for locked sockets
    python3 python3-venv                  # .venv
    ca-certificates procps util-linux
)

missing() {
    comm -23 <(printf '%s\n' "${PACKAGES[@]}" | sort) \
        <(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${PACKAGES[@]}" 2>/dev/null | sed -n 's/ installed$//p' | sort -u)
}

check_host() {
    [ "$(uname -m)" = x86_64 ] || die "this machine is $(uname -m)" "only x86-64 is supported"
    [ -r /sys/kernel/btf/vmlinux ] || die "the kernel gives no type information (BTF)" "use a kernel built with CONFIG_DEBUG_INFO_BTF=y"
    grep -qw btrfs /proc/filesystems || modprobe btrfs 2>/dev/null || die "the kernel has no btrfs" "load or install its btrfs module"
    grep -qw overlay /proc/filesystems || modprobe overlay 2>/dev/null || die "the kernel has no overlayfs" "load or install its overlay module"
    command -v apt-get >/dev/null || die "no apt-get here" "set-up knows Debian 12 and newer; elsewhere install what scripts/system.sh lists"
    local free
    free=$(df --output=avail -m "$ROOT" | tail -n 1)
    [ "$free" -ge 5000 ] || die "only $free MiB are free below $ROOT" "free at least 5000 MiB"
}

# The index of a mirror that is not refreshed goes past its date. Signatures are checked all the same.
update() {
    quiet apt-update apt-get update && return
    grep -q 'is expired\|not valid yet' "$LOGS/apt-update.log" || return 1
    say "the index of the mirror is past its date (or this machine's clock is wrong): use it all the same, its signature is checked"
    quiet apt-update apt-get -o Acquire::Check-Valid-Until=false -o Acquire::Check-Date=false update
}

main() {
    local wanted
    need_root
    check_host
    mapfile -t wanted < <(missing)
    if [ "${#wanted[@]}" -eq 0 ]; then
        say "system packages are there (compilers, btrfs, network tools)"
        return
    fi
    say "install ${wanted[*]} (compilers, btrfs, network tools)"
    update || die "apt-get update failed" "check the network and /etc/apt/sources.list"
    ABOUT=60 quiet apt-install apt-get install -y --no-install-recommends "${wanted[@]}" ||
        die "apt-get could not install the packages" "see $LOGS/apt-install.log; then run make setup again"
}

main
