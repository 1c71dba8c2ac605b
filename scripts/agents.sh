#!/usr/bin/env bash
# make setup-agents: agents from PyPI and npm, and images that carry them into sandboxes: `agents` with mini-swe-agent and
# the clients of models, `coding-agents` with aider and those of agents_npm.txt. An extra: the tests and the example of
# the gateway need it, nothing else.
STEP=agents
. "$(dirname "$0")/lib.sh"

PLACE=$PREFIX/agents
LIST=$ROOT/scripts/agents.txt
NPM_LIST=$ROOT/scripts/agents_npm.txt
AIDER=aider-chat==0.86.2 # in a place of its own: it pins what others do not

fingerprint() { cat "$LIST" "$NPM_LIST" "$0" "$ROOT/scripts/agents_image.py" | sha256sum | cut -d ' ' -f 1; }

from_npm() { # from_npm NAME PACKAGE
    local place=$PLACE/npm/$1
    [ "$(cat "$place/.wanted" 2>/dev/null || true)" != "$2" ] || return 0
    say "install $2 from npm"
    rm -rf "$place"
    mkdir -p "$place"
    quiet "agents-$1" npm install --silent --no-audit --no-fund --prefix "$place" "$2" ||
        die "$2 could not be installed by npm" "does the registry of npm answer? see $LOGS/agents-$1.log"
    printf %s "$2" >"$place/.wanted"
}

coding() {
    local name package
    while read -r name package; do from_npm "$name" "$package"; done < <(grep -v '^#' "$NPM_LIST")
    [ "$(cat "$PLACE/aider/.wanted" 2>/dev/null || true)" != "$AIDER" ] || return 0
    say "install $AIDER from PyPI"
    rm -rf "$PLACE/aider"
    quiet agents-aider "$PLACE/venv/bin/pip" install --disable-pip-version-check --timeout 20 --retries 1 \
        --target "$PLACE/aider" "$AIDER" || die "aider could not be installed" "see $LOGS/agents-aider.log"
    printf %s "$AIDER" >"$PLACE/aider/.wanted"
}

main() {
    mkdir -p "$PLACE"
    exec 9>"$PLACE/lock"
    flock 9
    if [ "$(cat "$PLACE/fingerprint" 2>/dev/null || true)" = "$(fingerprint)" ] && [ -e "$PLACE/images/agents" ]; then
        say "$PLACE matches agents.txt and agents_npm.txt"
        return
    fi
    say "install agents from PyPI (mini-swe-agent and the clients of OpenAI and Anthropic; about 700 MB)"
    [ -x "$PLACE/venv/bin/python" ] || quiet agents-venv "$PYTHON" -m venv "$PLACE/venv" ||
        die "no virtual environment could be made" "install python3-venv"
    quiet agents-pip "$PLACE/venv/bin/pip" install --disable-pip-version-check --timeout 20 --retries 1 -r "$LIST" ||
        die "the agents could not be installed" "is PyPI reachable? see $LOGS/agents-pip.log"
    if command -v npm >/dev/null; then
        say "install coding agents (about 2 GB)"
        coding
    else
        say "no npm here: coding agents are left out"
    fi
    say "make the images that carry them"
    quiet agents-image "$VENV/bin/python" "$ROOT/scripts/agents_image.py" "$STATE/images/debian" "$PLACE" ||
        die "the images could not be made" "see $LOGS/agents-image.log"
    # Their names for the daemon of this host; tests link them themselves.
    for image in "$PLACE"/images/*; do
        [ ! -d "$STATE/images" ] || ln -sfn "$(readlink -f "$image")" "$STATE/images/$(basename "$image")"
    done
    fingerprint >"$PLACE/fingerprint"
    say "$PLACE is complete"
}

main
