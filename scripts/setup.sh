#!/usr/bin/env bash
# make setup: from a fresh Debian to a machine that runs sandboxes. `setup.sh train` adds what training needs.
# Idempotent.
#
#   system ─┬▶ python ─▶ image ─┬▶ ready        (image mostly waits for the mirror)
#           └▶ criu ─▶ native ──┘
STEP=setup
. "$(dirname "$0")/lib.sh"

HERE=$ROOT/scripts
CHILDREN=() # pids of the steps in the background

criu_and_native() {
    "$HERE/criu.sh"
    "$HERE/native.sh"
}

python_and_image() {
    "$HERE/python.sh" hosts
    "$HERE/image.sh"
}

end_children() {
    local child
    for child in "${CHILDREN[@]}"; do kill "$child" 2>/dev/null || true; done
}

hosts() {
    "$HERE/system.sh"
    criu_and_native 9>&- &
    CHILDREN+=($!)
    python_and_image 9>&- &
    CHILDREN+=($!)
    trap end_children EXIT
    local child
    for child in "${CHILDREN[@]}"; do wait "$child"; done
    trap - EXIT
}

main() {
    local started=$SECONDS
    need_root
    # One set-up at a time: tests, a demo and a person may all ask for it.
    exec 9>"$PREFIX/setup.lock"
    flock 9
    case ${1:-hosts} in
    hosts) hosts ;;
    train) "$HERE/python.sh" train ;;
    *) die "no part $1" "run make setup or make setup-train" ;;
    esac
    say "${1:-hosts}: ready after $((SECONDS - started)) s; \`.venv/bin/pagurus doctor\` probes every capability"
}

main "$@"
