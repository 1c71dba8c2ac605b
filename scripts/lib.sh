# Shared by every script of this folder: where things go, and how a step speaks.
# Sourced, never run. Guarantee: a step prints one line saying what and why, its output goes to a log
# that is quoted when the step fails, and `die` always names a hint.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PREFIX=${PAGURUS_PREFIX:-$ROOT/.prefix}
STATE=${PAGURUS_STATE:-/var/lib/pagurus}
VENV=$ROOT/.venv
LOGS=$PREFIX/log
PYTHON=${PYTHON:-python3}
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
mkdir -p "$LOGS"

say() { printf '%-8s %s\n' "${STEP:-setup}" "$*"; }

die() { # die WHAT HINT
    printf '%-8s error: %s\n%-8s hint: %s\n' "${STEP:-setup}" "$1" "" "$2" >&2
    exit 1
}

# Every ten seconds a line: how long a step has run, and how long it takes on two cores (ABOUT, in seconds).
beat() { # beat LOG
    local began=$SECONDS about=${ABOUT:+ of about $ABOUT}
    while :; do
        read -rt 10 <> <(:) || true # ten seconds, without a child that would outlive this one
        say "... $((SECONDS - began)) s$about: $(tail -n 1 "$1" 2>/dev/null | tr -cd '[:print:]' | cut -c 1-90)"
    done
}

# quiet NAME COMMAND...: run with the output in a log; on failure show its end and return the status.
quiet() {
    local log="$LOGS/$1.log" status=0 beating
    shift
    beat "$log" &
    beating=$!
    "$@" >"$log" 2>&1 </dev/null || status=$?
    kill "$beating" 2>/dev/null || true
    if [ "$status" -ne 0 ]; then
        printf '%s failed (%s), the end of %s:\n' "$1" "$status" "$log" >&2
        tail -n 15 "$log" >&2
    fi
    return "$status"
}

# newer TARGET SOURCES...: true when TARGET exists and no source is newer than it.
newer() {
    local target=$1 source
    shift
    [ -e "$target" ] || return 1
    for source in "$@"; do [ ! "$source" -nt "$target" ] || return 1; done
}

version_at_least() { # version_at_least HAVE WANT
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

need_root() {
    [ "$(id -u)" -eq 0 ] || die "not root" "run it as root or with sudo: sandboxes need namespaces, BPF and CRIU"
}
