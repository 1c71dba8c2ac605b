#!/usr/bin/env bash
# make setup: from a fresh Debian to a machine that runs sandboxes. `setup.sh train` adds what training needs.
# Idempotent.
#
#   system ─┬▶ python ──────┬▶ image ─┬▶ ready        (python and the base image mostly wait for the network)
#           ├▶ base image ──┘         │
#           └▶ criu ─▶ native ────────┘
#
# What a set-up made is written down with what it was made of ($PREFIX/.setup): the next one finds it equal, and ends.
STEP=setup
. "$(dirname "$0")/lib.sh"

HERE=$ROOT/scripts
CHILDREN=() # the steps in the background, each the leader of its process group

beside() { # beside COMMAND...: run it in the background, in a group of its own with all that it starts
    setsid "$@" 9>&- &
    CHILDREN+=($!)
}

sources() { # what a part is made of
    cat "$HERE"/*.sh "$ROOT"/pyproject.toml "$ROOT"/requirements*.lock "$ROOT"/sandbox/native/* "$ROOT"/ebpf/*.[ch] |
        sha256sum | cut -d ' ' -f 1
    echo "$ROOT $PREFIX $STATE"
}

complete() { # complete PART: whether a set-up of these sources has ended, and its parts are there
    [ "$(cat "$PREFIX/.setup-$1" 2>/dev/null || true)" = "$(sources)" ] || return 1
    [ -x "$VENV/bin/pagurus" ] && [ -d "$STATE/images/debian" ] && [ -x "$PREFIX/criu/bin/criu" ] &&
        [ -x "$PREFIX/bin/pagurus-shim" ] && [ -e "$PREFIX/bpf/inspector.bpf.o" ] && [ -e "$PREFIX/bpf/addresses.bpf.o" ] &&
        { [ "$1" = hosts ] || [ -e "$VENV/.train" ]; }
}

plan() {
    say "into $VENV, $PREFIX and $STATE, about two minutes on two cores where packages come fast:"
    say "  Debian packages for the system (clang, btrfs, nftables, skopeo; up to 150 MB), CRIU (20 MB),"
    say "  Python packages (60 MB), a small Debian as base image (60 MB). What is there already stays."
}

end_children() { # a step failed, or Ctrl-C: nothing of the others goes on behind the next prompt
    local child
    for child in "${CHILDREN[@]}"; do kill -- "-$child" 2>/dev/null || true; done
    for child in "${CHILDREN[@]}"; do wait "$child" 2>/dev/null || true; done
}

hosts() {
    plan
    "$HERE/system.sh"
    trap end_children EXIT
    beside sh -c '"$0/criu.sh" && "$0/native.sh"' "$HERE"
    beside "$HERE/python.sh" hosts
    beside "$HERE/image.sh" fetch
    local child
    for child in "${CHILDREN[@]}"; do wait "$child"; done
    trap - EXIT
    "$HERE/image.sh" import
}

page() { # an extra: where node or npm lack, it is left out
    [ ! -x "$HERE/page.sh" ] || "$HERE/page.sh" 9>&-
}

main() {
    local started=$SECONDS
    need_root
    # One set-up at a time: tests, a demo and a person may all ask for it.
    exec 9>"$PREFIX/setup.lock"
    flock 9
    if complete "${1:-hosts}"; then
        page
        say "${1:-hosts}: everything is there; \`.venv/bin/pagurus doctor\` probes it"
        return
    fi
    case ${1:-hosts} in
    hosts)
        hosts # not `hosts && page`: errexit would not hold in it
        page
        ;;
    train) "$HERE/python.sh" train ;;
    *) die "no part $1" "run make setup or make setup-train" ;;
    esac
    sources >"$PREFIX/.setup-${1:-hosts}"
    say "${1:-hosts}: ready after $((SECONDS - started)) s; \`.venv/bin/pagurus doctor\` probes every capability"
}

main "$@"
