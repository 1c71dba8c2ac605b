#!/usr/bin/env bash
# make setup-trl: TRL and what it imports, aside from .venv, for the tests that compare losses with its own.
# An extra: nothing else needs it. Its pandas, pyarrow and datasets also serve tests of Parquet.
STEP=trl
. "$(dirname "$0")/lib.sh"

PLACE=$PREFIX/trl
PACKAGES="trl==1.16.0 datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1 dill multiprocess fsspec xxhash python-dateutil pytz tzdata six"

fingerprint() { cat "$0" | sha256sum | cut -d ' ' -f 1; }

main() {
    if [ "$(cat "$PLACE/fingerprint" 2>/dev/null || true)" = "$(fingerprint)" ]; then
        say "$PLACE is complete"
        return
    fi
    say "install trl into $PLACE (200 MB)"
    rm -rf "$PLACE"
    # shellcheck disable=SC2086 - a list of words
    quiet trl "$VENV/bin/python" -m pip install --target "$PLACE" --no-deps $PACKAGES ||
        die "trl could not be installed" "is PyPI reachable? see $LOGS/trl.log"
    fingerprint >"$PLACE/fingerprint"
    say "$PLACE is complete"
}

main
