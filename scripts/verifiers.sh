#!/usr/bin/env bash
# make setup-verifiers: the package `verifiers` in an environment of its own, for the test of its adapter.
# Apart from .venv because it brings another version of openai than ours. An extra: nothing else needs it.
STEP=verifiers
. "$(dirname "$0")/lib.sh"

PLACE=$PREFIX/verifiers

main() {
    if [ "$(cat "$PLACE/.version" 2>/dev/null || true)" = "$(sha256sum <"$0")" ]; then
        say "$PLACE is there"
        return
    fi
    say "install verifiers from PyPI (about 300 MB)"
    quiet verifiers-venv "$PYTHON" -m venv "$PLACE" || die "no virtual environment could be made" "install python3-venv"
    quiet verifiers-pip "$PLACE/bin/pip" install --disable-pip-version-check verifiers==0.4.0 ||
        die "verifiers could not be installed" "is PyPI reachable? see $LOGS/verifiers-pip.log"
    sha256sum <"$0" >"$PLACE/.version"
    say "$PLACE is complete"
}

main
