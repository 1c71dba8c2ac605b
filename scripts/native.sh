#!/usr/bin/env bash
# Compiles what the kernel asks for: the shim and pid 1 of sandboxes, and the inspector's BPF object.
STEP=native
. "$(dirname "$0")/lib.sh"

BPF=$PREFIX/bpf

build_shim() {
    if newer "$PREFIX/bin/pagurus-shim" "$ROOT"/sandbox/native/* "$ROOT/sandbox/container/layer.py" && [ -x "$PREFIX/bin/pagurus-criu-root" ] &&
        [ -e "$PREFIX/criu-plugins/waits.so" ] && [ -e "$PREFIX/lib/frozen.so" ] && [ -e "$PREFIX/lib/written.so" ] &&
        [ -x "$PREFIX/runtime/init" ] && [ -x "$PREFIX/layer/.pagurus/init" ]; then
        say "shim and pid 1 are up to date"
        return
    fi
    say "compile the shim and pid 1 (one small static process of ours per sandbox on each side)"
    quiet shim sh "$ROOT/sandbox/native/build.sh" "$PREFIX" || die "the shim does not compile" "see $LOGS/shim.log"
}

kernel_types() { # the kernel's own types as C: the object is compiled once and relocated at load
    local new
    new=$(mktemp "$BPF/vmlinux.XXXXXX")
    bpftool btf dump file /sys/kernel/btf/vmlinux format c >"$new" && mv "$new" "$BPF/vmlinux.h"
}

build_bpf() { # NAME WHAT-IT-IS
    if newer "$BPF/$1.bpf.o" "$ROOT"/ebpf/*.c "$ROOT"/ebpf/*.h "$ROOT"/sandbox/native/wait.h; then
        say "$1 is up to date"
        return
    fi
    say "compile $1 to BPF ($2)"
    mkdir -p "$BPF"
    [ -s "$BPF/vmlinux.h" ] || kernel_types || die "bpftool cannot read the kernel's types" "check /sys/kernel/btf/vmlinux"
    quiet "$1" clang -O2 -g -target bpf -mcpu=v3 -D__TARGET_ARCH_x86 -I"$BPF" -Wall -Wno-unused-function \
        -c "$ROOT/ebpf/$1.bpf.c" -o "$BPF/$1.bpf.o.new" ||
        die "$1 does not compile" "see $LOGS/$1.log"
    mv "$BPF/$1.bpf.o.new" "$BPF/$1.bpf.o"
}

need_root # device nodes of the runtime layer
build_shim
build_bpf inspector "sees in the kernel what a turn did"
build_bpf addresses "gives each service of a composition an address"
