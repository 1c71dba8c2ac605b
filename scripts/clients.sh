#!/usr/bin/env bash
# make setup-clients: other people's tools from PyPI and npm, each in an environment of its own, for the tests that run
# them unmodified against a real daemon. An extra: nothing else needs them.
STEP=clients
. "$(dirname "$0")/lib.sh"

PLACE=$PREFIX/clients
JAVASCRIPT=2.51.0 # of e2b from npm; its test needs node
COMMANDS=2.19.0 # of @e2b/cli
CLIENT="aiohttp msgspec pyyaml dockerfile blake3 typer<0.29 rich setuptools"
export UV_PYTHON_DOWNLOADS=never UV_NATIVE_TLS=1

# Many environments of large packages: uv shares their files, and knows where Python's versions lie.
# pyenv's shims answer for the chosen version only, so the interpreters themselves come first.
PYENV_BINS=$(printf '%s:' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin)
uv() { PATH=$PYENV_BINS$PATH "$PLACE/uv/bin/uv" "$@"; }

get_uv() {
    [ ! -x "$PLACE/uv/bin/uv" ] || return 0
    quiet clients-uv "$PYTHON" -m venv --clear "$PLACE/uv" ||
        die "no virtual environment could be made" "install python3-venv"
    quiet clients-uv "$PLACE/uv/bin/pip" install --disable-pip-version-check uv ||
        die "uv could not be installed" "is PyPI reachable? see $LOGS/clients-uv.log"
}

install() { # install NAME PYTHON REQUIREMENT...
    local name=$1 python=$2 place=$PLACE/$1 wanted="$*" ours=
    shift 2
    if [ "$(cat "$place/.wanted" 2>/dev/null || true)" = "$wanted" ]; then
        say "$place is there"
        return
    fi
    if ! uv python find --quiet "$python" >/dev/null 2>&1; then
        say "no Python $python here: $name is left out"
        return
    fi
    say "install $name from PyPI"
    if [ "${1:-}" = "+client" ]; then
        ours=yes
        shift
        # shellcheck disable=SC2086 # a list of words
        set -- "$@" $CLIENT
    fi
    quiet "clients-$name" uv venv --clear --python "$python" "$place" ||
        die "no environment could be made for $name" "see $LOGS/clients-$name.log"
    if ! quiet "clients-$name" uv pip install --python "$place/bin/python" "$@"; then
        say "$name could not be installed and is left out: is PyPI reachable? see $LOGS/clients-$name.log"
        rm -rf "$place"
        return
    fi
    # By its metadata the tools find our plug-ins.
    [ -z "$ours" ] || quiet "clients-$name" uv pip install --python "$place/bin/python" --no-deps --no-build-isolation \
        --editable "$ROOT" || die "our client could not be installed for $name" "see $LOGS/clients-$name.log"
    printf %s "$wanted" >"$place/.wanted"
    say "$place is complete"
}

from_npm() { # from_npm NAME PACKAGE VERSION
    local place=$PLACE/$1
    if ! command -v npm >/dev/null; then
        say "no npm here: $2 is left out"
        return
    fi
    if [ "$(cat "$place/.version" 2>/dev/null || true)" = "$3" ]; then
        say "$place is there"
        return
    fi
    say "install $2 $3 from npm"
    mkdir -p "$place"
    quiet "npm-$1" npm install --silent --no-audit --no-fund --prefix "$place" "$2@$3" ||
        die "$2 could not be installed by npm" "does the registry of npm answer? see $LOGS/npm-$1.log"
    printf %s "$3" >"$place/.version"
    say "$place is complete"
}

mkdir -p "$PLACE"
exec 9>"$PLACE/lock"
flock 9
get_uv
grep -v '^#' "$ROOT/scripts/clients.txt" | while read -r line; do
    # shellcheck disable=SC2086 # words
    install $line
done
from_npm js e2b "$JAVASCRIPT"
from_npm cli @e2b/cli "$COMMANDS"
