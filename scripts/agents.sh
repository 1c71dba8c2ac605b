#!/usr/bin/env bash
# make setup-agents: agents from PyPI in an environment of their own, and an image that carries them into sandboxes.
# An extra: the tests and the example of the gateway need it, nothing else.
STEP=agents
. "$(dirname "$0")/lib.sh"

PLACE=$PREFIX/agents
LIST=$ROOT/scripts/agents.txt

fingerprint() { cat "$LIST" "$0" "$ROOT/scripts/agents_image.py" | sha256sum | cut -d ' ' -f 1; }

main() {
    mkdir -p "$PLACE"
    exec 9>"$PLACE/lock"
    flock 9
    if [ "$(cat "$PLACE/fingerprint" 2>/dev/null || true)" = "$(fingerprint)" ] && [ -e "$PLACE/images/agents" ]; then
        say "$PLACE matches agents.txt"
        return
    fi
    say "install agents from PyPI (mini-swe-agent and the clients of OpenAI and Anthropic; about 700 MB)"
    [ -x "$PLACE/venv/bin/python" ] || quiet agents-venv "$PYTHON" -m venv "$PLACE/venv" ||
        die "no virtual environment could be made" "install python3-venv"
    quiet agents-pip "$PLACE/venv/bin/pip" install --disable-pip-version-check --timeout 20 --retries 1 -r "$LIST" ||
        die "the agents could not be installed" "is PyPI reachable? see $LOGS/agents-pip.log"
    say "make the image that carries them"
    quiet agents-image "$VENV/bin/python" "$ROOT/scripts/agents_image.py" "$STATE/images/debian" "$PLACE" ||
        die "the image could not be made" "see $LOGS/agents-image.log"
    # Its name for the daemon of this host; tests link it themselves.
    [ ! -d "$STATE/images" ] || ln -sfn "$(readlink -f "$PLACE/images/agents")" "$STATE/images/agents"
    fingerprint >"$PLACE/fingerprint"
    say "$PLACE is complete"
}

main
