#!/usr/bin/env bash
# make setup: from a fresh Debian to a machine that runs sandboxes and trains. Idempotent.
#
#   system ─▶ python ─┬▶ image (in the background: it mostly waits for the mirror)
#                     └▶ criu ─▶ native ─▶ ready
STEP=setup
. "$(dirname "$0")/lib.sh"

IMAGE= # pid of the step in the background

main() {
    local here=$ROOT/scripts started=$SECONDS
    need_root
    # One set-up at a time: tests, a demo and a person may all ask for it.
    exec 9>"$PREFIX/setup.lock"
    flock 9
    "$here/system.sh"
    "$here/python.sh"
    "$here/image.sh" 9>&- &
    IMAGE=$!
    trap 'kill "$IMAGE" 2>/dev/null || true' EXIT
    "$here/criu.sh"
    "$here/native.sh"
    trap - EXIT
    wait "$IMAGE"
    say "ready after $((SECONDS - started)) s; \`.venv/bin/pagurus doctor\` probes every capability"
}

main
