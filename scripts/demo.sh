#!/usr/bin/env bash
# make demo: train an agent in real sandboxes. Uses the daemon that runs, else starts one for the duration.
# usage: demo.sh SEED [options of `pagurus train`]
STEP=demo
. "$(dirname "$0")/lib.sh"

RUN=${PAGURUS_RUN:-/run/pagurus}
DAEMON=

answers() { "$VENV/bin/pagurus" ls --json >/dev/null 2>&1; }

stop_daemon() {
    [ -n "$DAEMON" ] || return 0
    kill "$DAEMON" 2>/dev/null || true
    wait "$DAEMON" 2>/dev/null || true
}

start_daemon() {
    local log=$LOGS/daemon.log
    say "start the daemon of this host (its log: $log)"
    "$VENV/bin/pagurus" daemon --stop-sandboxes >"$log" 2>&1 &
    DAEMON=$!
    trap stop_daemon EXIT
    for _ in $(seq 150); do
        ! answers || return 0
        kill -0 "$DAEMON" 2>/dev/null || break
        sleep 0.2
    done
    tail -n 15 "$log" >&2
    die "the daemon does not answer on $RUN/pagurus.sock" "run .venv/bin/pagurus doctor and see $log"
}

main() {
    local seed=$1
    shift
    cd "$ROOT"
    if answers; then say "use the daemon that runs on this host"; else start_daemon; fi
    "$VENV/bin/pagurus" train examples/fix_the_service --faults 16 --seed "$seed" "$@"
}

main "$@"
