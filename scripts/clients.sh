#!/usr/bin/env bash
# make setup-clients: other people's clients from PyPI and npm, each in an environment of its own, for the tests that run them
# unmodified against a real daemon. An extra: nothing else needs them.
STEP=clients
. "$(dirname "$0")/lib.sh"

install() { # install VERSION
    local place=$PREFIX/clients/e2b-$1
    if [ "$(cat "$place/.version" 2>/dev/null || true)" = "$1" ]; then
        say "$place is there"
        return
    fi
    say "install e2b $1 from PyPI (about 60 MB)"
    quiet "e2b-$1-venv" "$PYTHON" -m venv --clear "$place" ||
        die "no virtual environment could be made" "install python3-venv"
    quiet "e2b-$1-pip" "$place/bin/pip" install --disable-pip-version-check "e2b==$1" ||
        die "e2b $1 could not be installed" "is PyPI reachable? see $LOGS/e2b-$1-pip.log"
    printf %s "$1" >"$place/.version"
    say "$place is complete"
}

JAVASCRIPT=2.51.0 # of e2b from npm; its test needs node

javascript() {
    local place=$PREFIX/clients/js
    if ! command -v npm >/dev/null; then
        say "no npm here: the client of JavaScript is left out"
        return
    fi
    if [ "$(cat "$place/.version" 2>/dev/null || true)" = "$JAVASCRIPT" ]; then
        say "$place is there"
        return
    fi
    say "install e2b $JAVASCRIPT from npm"
    mkdir -p "$place"
    quiet e2b-npm npm install --silent --no-audit --no-fund --prefix "$place" "e2b@$JAVASCRIPT" ||
        die "e2b could not be installed by npm" "does the registry of npm answer? see $LOGS/e2b-npm.log"
    printf %s "$JAVASCRIPT" >"$place/.version"
    say "$place is complete"
}

mkdir -p "$PREFIX/clients"
exec 9>"$PREFIX/clients/lock"
flock 9
grep -v '^#' "$ROOT/scripts/clients.txt" | while read -r version; do
    install "$version"
done
javascript
