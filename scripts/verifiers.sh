#!/usr/bin/env bash
# make setup-verifiers: the package `verifiers` for the test of its adapters, as it is and as it was while it had
# MultiTurnEnv and ToolEnv. Each in an environment of its own, since they bring other versions of openai than ours, and
# as extras: nothing else needs them.
STEP=verifiers
. "$(dirname "$0")/lib.sh"

install() { # install NAME VERSION
    local place=$PREFIX/$1
    if [ "$(cat "$place/.version" 2>/dev/null || true)" = "$2" ]; then
        say "$place is there"
        return
    fi
    say "install verifiers $2 from PyPI (about 300 MB)"
    quiet "$1-venv" "$PYTHON" -m venv --clear "$place" || die "no virtual environment could be made" "install python3-venv"
    quiet "$1-pip" "$place/bin/pip" install --disable-pip-version-check "verifiers==$2" ||
        die "verifiers could not be installed" "is PyPI reachable? see $LOGS/$1-pip.log"
    printf %s "$2" >"$place/.version"
    say "$place is complete"
}

install verifiers 0.4.0
install verifiers-classic 0.3.1
